"""Which rank does what, which splits are refused, and what --plan says of them."""

import subprocess
import sys

import pytest
from conftest import ROOT, changed

import placement
from config import ConfigError, presets

TINY = presets()["tiny"]()


def split(trainers: int, actors: int, tp: int = 1):
    return changed(TINY, trainers=trainers, actors=actors, actor=dict(tp=tp))


def test_trainers_come_first_then_actors_and_the_light_roles_are_beside_rank_0():
    cfg = split(trainers=2, actors=3, tp=2)
    assert placement.world_size(cfg) == 8
    assert [placement.roles(cfg, rank) for rank in range(8)] == [
        ["train-0", "preprocess", "reward"], ["train-1"], ["actor-0"], [], ["actor-1"], [], ["actor-2"], [],
    ]  # fmt: skip


@pytest.mark.parametrize(
    "trainers, actors, tp, nodes, per_node, words",
    [
        (8, 1, 1, 1, 8, "no actor left: 8 trainers take all of the 1 × 8 = 8 ranks"),
        (0, 8, 1, 1, 8, "no trainer left: trainers is 0 of 1 × 8 = 8 ranks"),
        (4, 2, 1, 1, 8, "4 trainers + 2 actors × tp 1 = 6, but there are 1 × 8 = 8 ranks: --actors 4 would"),
        (4, 8, 1, 1, 8, "4 trainers + 8 actors × tp 1 = 12, but there are 1 × 8 = 8 ranks: --actors 4 would"),
        (3, 2, 2, 1, 8, "change --trainers, (8 - 3) is no multiple of tp 2"),
        (8, 1, 16, 3, 8, "actor.tp 16 is over the 8 ranks of a machine"),
        (6, 5, 2, 2, 8, None),
        (7, 3, 3, 2, 8, r"actor-0 (tp 3) would take ranks 7 to 9 of machines with 8: across two of them"),
        (80, 48, 1, 16, 8, None),
    ],
)
def test_split_that_does_not_fit_is_refused_with_the_arithmetic(trainers, actors, tp, nodes, per_node, words):
    cfg = split(trainers, actors, tp)
    if words is None:
        placement.check_split(cfg, nodes, per_node)
        return
    with pytest.raises(ConfigError) as refused:
        placement.check_split(cfg, nodes, per_node)
    assert words in str(refused.value)


def test_every_machine_places_its_own_ranks_and_an_engine_has_all_its_gpus():
    cfg = changed(split(trainers=4, actors=2, tp=2), device="cuda")
    gpus = list("0123")
    first = placement.plan(cfg, range(16), gpus, range(0, 4))
    second = placement.plan(cfg, range(16), gpus, range(4, 8))
    assert sorted(first) == ["preprocess", "reward", "train-0", "train-1", "train-2", "train-3"]
    assert {name: place.gpu for name, place in second.items()} == {"actor-0": "0,1", "actor-1": "2,3"}
    assert second["actor-0"].parts == 2 and len(second["actor-0"].cores) == 8 and second["actor-0"].threads == 4


def test_with_conventional_trainers_and_actors_share_ranks_cores_and_gpus():
    cfg = changed(split(trainers=4, actors=2, tp=2), schedule="conventional", max_lag=None, device="cuda")
    assert placement.world_size(cfg) == 4
    assert [placement.roles(cfg, rank) for rank in range(4)] == [
        ["train-0", "preprocess", "reward", "actor-0"], ["train-1"], ["train-2", "actor-1"], ["train-3"],
    ]  # fmt: skip
    places = placement.plan(cfg, range(8), list("0123"))
    assert places["actor-1"].gpu == "2,3" and places["train-2"].gpu == "2" and places["train-3"].gpu == "3"
    assert places["train-3"].cores == places["actor-1"].cores[:2] and len(places["actor-1"].cores) == 4
    placement.check_split(cfg, 1, 4)
    with pytest.raises(ConfigError, match="trains on all of the 1 × 8 = 8 ranks, not on 4: --trainers 8"):
        placement.check_split(cfg, 1, 8)


def test_torchrun_s_variables_are_read_and_taken_away(monkeypatch):
    """vLLM would read some of them."""
    said = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "head",
            "MASTER_PORT": "29400", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "1",
            "GROUP_RANK": "1", "ROLE_RANK": "5", "LOCALE": "C"}  # fmt: skip
    for name in list(placement.os.environ):
        if name.startswith(("MASTER_", "TORCHELASTIC_", "GROUP_", "ROLE_", "LOCAL_", "RANK", "WORLD_SIZE")):
            monkeypatch.delenv(name)
    assert placement.from_environment() is None
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    ranks = placement.from_environment()
    assert (ranks.rank, ranks.size, ranks.host, ranks.port, ranks.agent_store) == (5, 8, "head", 29400, True)
    assert ranks.here == range(4, 8) and ranks.machines == 2
    left = {name for name in said if name in placement.os.environ}
    assert left == {"LOCALE"}


def plan_of(*argv: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "launch.py", *argv], cwd=ROOT, capture_output=True, text=True)


def test_plan_prints_the_placement_the_memory_and_the_model_s_opinion_without_starting_anything():
    done = plan_of("math", "--plan", "--nodes", "16", "--gpus-per-node", "8")
    assert done.returncode == 0, done.stderr
    text = done.stdout
    assert "16 machines of 8 GPUs: 80 train, 48 actors × tp 1" in text
    rows = [line.split("  ") for line in text.splitlines()]
    assert [row[0] for row in rows if row[0].strip().isdigit()] == [str(n) for n in range(16)]
    # Qwen2.5-7B has 7.62e9 parameters: 2 bytes each are 14.2 GiB; 4 bytes over 80 trainers 0.35
    assert "weights                                 0.4     14.2" in text
    assert "optimizer (Adam)                        0.7      0.0" in text
    # 2 (k and v) · 28 layers · 4 heads · 128 · 2 bytes = 57,344 a token; × 64 sequences × 9,216 tokens = 31.5 GiB
    assert "31.5 GiB would hold 64 sequences of 9,216 tokens" in text
    # ceil(64 · 48 · 2 / 1024) = 6
    (ours,) = [line for line in text.splitlines() if line.startswith("this split")]
    assert ours.split()[-2:] == ["6", "generation"]
    assert "the model's, lag ≤ 6" in text
    turns = ("--schedule", "conventional", "--G", "8", "--trainers", "16", "--actors", "16")
    done = plan_of("math", "--plan", "--nodes", "2", "--gpus-per-node", "8", *turns)
    assert done.returncode == 0 and "16 train, 16 actors × tp 1, in turns on the same GPUs" in done.stdout, done.stderr
    (ours,) = [line for line in done.stdout.splitlines() if line.startswith("this split")]
    assert ours.split()[2:] == ["–", "all", "16", *ours.split()[5:7], "7", "both,", "in", "turns"]
    refused = plan_of("math", "--plan", "--nodes", "2", "--gpus-per-node", "8")
    assert refused.returncode == 2 and "80 trainers take all of the 2 × 8 = 16 ranks" in refused.stderr
