"""Both ends of a slow link: `trainer HOST` sends versions, `actor HOST` decodes with vLLM and takes them in flight."""

import datetime
import multiprocessing
import os
import statistics
import sys
import time

os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from config import presets
from model_files import model_layout
from nodes import interface_towards
from store import Link
from weights import BroadcastWeights

PORT, VERSIONS, PAUSE_S = 29500, 6, 2.0


def channel(host: str) -> BroadcastWeights:
    os.environ["GLOO_SOCKET_IFNAME"] = interface_towards(host, PORT)[0]
    cfg = presets()["tiny"]()
    return BroadcastWeights(model_layout(cfg.model), "float32", Link(host, PORT, "slow", b"", 60.0), 2)


def trainer(host: str) -> dict:
    store = dist.TCPStore(host, PORT, None, True, wait_for_workers=False)
    cfg, weights = presets()["tiny"](), channel(host)
    tensors = load_file(cfg.model / "model.safetensors")
    weights.join(0, torch.device("cpu"))
    seconds = []
    store.wait(["decoding"], datetime.timedelta(seconds=200))
    for version in range(1, VERSIONS + 1):
        time.sleep(PAUSE_S)
        store.set("sending", str(version))
        weights.publish(version, ((name, tensors[name]) for name in weights.layout))
        while weights.version < version:
            time.sleep(0.01)
        seconds.append(weights.transfer_s)
    weights.close()
    return {"seconds": seconds, "bytes": sum(t.numel() for t in tensors.values()) * 4}


def actor(host: str) -> dict:
    from actor import Engine

    cfg, weights = presets()["tiny"](), channel(host)
    engine = Engine(cfg, seed=0, device="cpu")
    engine.join_weight_channel(weights)
    generator, live, stalls = torch.Generator().manual_seed(0), set(), []
    rates: list[dict[bool, list[float]]] = [{True: [], False: []} for _ in range(VERSIONS)]  # during, before each
    store = dist.TCPStore(host, PORT, None, False)

    def decode(seconds: float) -> tuple[float, bool]:
        """Tokens a second, and whether a version was on its way for all of that time."""
        tokens, start, moving = 0, time.monotonic(), engine.staged < 0
        always = moving
        while time.monotonic() < start + seconds:
            while len(live) < 128:
                prompt = torch.randint(1, 10, (6,), generator=generator).tolist()
                live.add(engine.submit(prompt, 1.0))
            tokens += len(live)
            live.difference_update(engine.step())
            engine.look_for_weights()
            if engine.staged > engine.version:
                stalls.append(engine.load_weights())
            engine.stage_weights()
            always, moving = always and engine.staged < 0, moving or engine.staged < 0
        return tokens / (time.monotonic() - start), always if moving else None

    decode(5.0)
    store.set("slow/decoding", "1")
    store.set("decoding", "1")
    while engine.version < VERSIONS:
        before = engine.version
        rate, moving = decode(0.25)
        if moving is not False and engine.version == before:
            rates[before][bool(moving)].append(rate)
    return {"ratios": [statistics.median(r[True]) / statistics.median(r[False]) for r in rates], "stalls": stalls}


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    print("RESULT", {"trainer": trainer, "actor": actor}[sys.argv[1]](sys.argv[2]), flush=True)
    os._exit(0)
