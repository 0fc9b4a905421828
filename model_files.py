"""Model files: what lies in the folder of a model in Hugging Face format, and where that folder is."""

import json
import shutil
from pathlib import Path

from safetensors import safe_open

from config import Config, ConfigError


def model_folder(model: Path) -> Path:
    """A folder as it is; `org/name`, if there is no such folder, from the hub or its cache on this disk."""
    if model.is_dir() or model.is_absolute() or len(model.parts) != 2:
        return model.resolve()
    from huggingface_hub import snapshot_download

    try:
        files = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
        return Path(snapshot_download(str(model), allow_patterns=files))
    except Exception as error:  # of the network, of the hub, of the disk: all mean the same here
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"model {model}: no such folder, and the hub does not give it ({reason})") from None


def model_layout(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every weight in the folder's safetensors files: what travels from trainer to actors."""
    layout = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            layout |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
    return layout


def copy_model_files(model: Path, folder: Path) -> None:
    """What belongs to a model beside its weights (tokenizer, templates, config), unless `folder` has its own."""
    for path in model.iterdir():
        if path.is_file() and "safetensors" not in path.name and not (folder / path.name).exists():
            shutil.copy(path, folder)


def load_tokenizer(folder: Path):
    """What AutoTokenizer finds; but a folder that names the general class gets its own tokenizer.json as it is: beside
    some models AutoTokenizer would put another in its place, and its import alone takes 3 s of a core."""
    config = folder / "tokenizer_config.json"
    if config.is_file() and json.loads(config.read_text()).get("tokenizer_class") == "TokenizersBackend":
        from transformers import PreTrainedTokenizerFast as Tokenizer
    else:
        from transformers import AutoTokenizer as Tokenizer
    return Tokenizer.from_pretrained(folder)


def uses_chat_template(cfg: Config) -> bool:
    """Whether prompts go through the tokenizer's chat template."""
    if cfg.prompt.template != "auto":
        return cfg.prompt.template == "chat"
    return has_chat_template(cfg.model)


def has_chat_template(model: Path) -> bool:
    """Seen in the files: the tokenizer need not be loaded for it."""
    config = model / "tokenizer_config.json"
    in_config = config.is_file() and json.loads(config.read_text()).get("chat_template")
    return bool(in_config) or any((model / f"chat_template.{ending}").is_file() for ending in ("jinja", "json"))
