"""Policy: the language model as trainer and reference see it: packed tokens in, log-probabilities out.

What it computes is what transformers computes; attention stays inside each sequence of the packed row, and the logits
are never held (bench/head.py and bench/train.py measure what that saves). T tokens in a packed row, S sequences,
C completion tokens that enter the loss, V entries in the vocabulary, D the width of the model.
"""

from pathlib import Path

import torch
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from queues import MicroBatch


def sequence_attention(module, query, key, value, attention_mask, scaling, cu_seq_lens_q=None, max_length_q=None, **_):
    """Causal attention inside each sequence of a packed row: transformers' attention interface.

    query (1, H, T, D), key and value (1, H_kv, T, D) -> (1, T, H, D). Sequence s is at cu_seq_lens_q[s:s+2]. In half
    precision on a GPU: torch's flash kernels for ragged rows. Otherwise sequences of like length become the rows of a
    batch padded to their longest: at most four times the work of their own, and not the T² of a dense mask (with which
    a step of `tiny` takes twice as long).
    """
    grouped = query.shape[1] != key.shape[1]
    if query.is_cuda and query.dtype != torch.float32:
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (T, heads, D)
        ends, longest = cu_seq_lens_q, max_length_q
        out = varlen_attn(q, k, v, ends, ends, longest, longest, scale=scaling, window_size=(-1, 0), enable_gqa=grouped)
        return out[None], None
    lengths, outs, positions = cu_seq_lens_q.diff(), [], []
    size = lengths.log2().ceil()  # alike: within a factor of two
    for one in size.unique():
        own = lengths[size == one]  # (S,) of S sequences
        offsets = torch.arange(int(own.max()), device=query.device)  # (L,)
        real = offsets < own[:, None]  # (S, L); past its end a row reads its neighbour, unused
        index = (cu_seq_lens_q[:-1][size == one][:, None] + offsets).clamp(max=query.shape[2] - 1)
        rows = (x[0][:, index].transpose(0, 1) for x in (query, key, value))  # (S, heads, L, D) each
        out = torch.nn.functional.scaled_dot_product_attention(
            *rows, is_causal=True, scale=scaling, enable_gqa=grouped
        )  # (S, H, L, D)
        outs.append(out.transpose(1, 2)[real])
        positions.append(index[real])
    return torch.cat(outs)[torch.cat(positions).argsort()][None], None


AttentionInterface.register("sequence", sequence_attention)


class HeadLogprobs(torch.autograd.Function):
    """Log-probs of `targets` under softmax(hidden @ weight.T / temperature), without ever holding (C, V) numbers.

    hidden (C, D), weight (V, D), targets (C,) -> log-probs and, without gradient, entropies: both (C,) float32. Tokens
    go through the head in chunks, whose logits backward computes again: one more product, 1/13 of the memory at
    V = 151,936 (bench/head.py).
    """

    LOGITS = {"cpu": 2**26, "cuda": 2**28}  # of a chunk

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature):
        chunk, parts = max(1, HeadLogprobs.LOGITS[weight.device.type] // len(weight)), []
        for h, target in zip(hidden.split(chunk), targets.split(chunk), strict=True):
            logits = (h @ weight.T).float().div_(temperature)  # (chunk, V)
            chosen, norm = logits.gather(-1, target[:, None]).squeeze(-1), logits.logsumexp(-1)
            entropy = norm - torch.linalg.vecdot((logits - norm[:, None]).exp_(), logits)
            parts.append((chosen - norm, entropy, norm))
        logprobs, entropy, norm = map(torch.cat, zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, targets, norm)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad, _):
        hidden, weight, targets, norm = ctx.saved_tensors
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        chunk = max(1, HeadLogprobs.LOGITS[weight.device.type] // len(weight))
        chunks = (x.split(chunk) for x in (hidden, targets, norm, grad, grad_hidden))
        for h, target, n, g, grad_h in zip(*chunks, strict=True):
            d = (h @ weight.T).float().div_(ctx.temperature).sub_(n[:, None]).exp_()  # softmax, (chunk, V)
            g = g[:, None] / ctx.temperature
            d = d.mul_(-g).scatter_add_(1, target[:, None], g).to(weight.dtype)  # (onehot(target) - softmax) · g
            torch.mm(d, weight, out=grad_h)
            if weight.dtype == torch.float32:
                grad_weight.addmm_(d.T, h)
            else:
                grad_weight.add_(d.T @ h)  # summed in float32 over the chunks
        return grad_hidden, grad_weight.to(weight.dtype), None, None


class Policy(torch.nn.Module):
    """A causal language model of transformers that says how likely the tokens of a packed row are."""

    def __init__(self, lm: torch.nn.Module):
        super().__init__()
        self.lm = lm

    def forward(self, micro_batch: MicroBatch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability and entropy of the masked tokens at the sampler's temperature, both (C,) float32."""
        index = micro_batch.mask.nonzero().squeeze(1)  # (C,)
        starts = (micro_batch.position_ids == 0).nonzero().squeeze(1)  # (S,)
        ends = torch.cat([starts, starts.new_tensor([len(micro_batch.mask)])])  # (S + 1,)
        hidden = self.lm.base_model(
            input_ids=micro_batch.input_ids[None],
            position_ids=micro_batch.position_ids[None],
            use_cache=False,
            cu_seq_lens_q=ends.int(),
            max_length_q=int(ends.diff().max()),
        ).last_hidden_state[0]  # (T, D)
        head, targets = self.lm.get_output_embeddings(), micro_batch.input_ids[index]
        # The state at t - 1 predicts token t. A masked token is never the first of its sequence, so t - 1 is in it too.
        return HeadLogprobs.apply(hidden[index - 1], head.weight, targets, temperature)


def load_policy(folder: Path, dtype: torch.dtype, device: torch.device) -> Policy:
    """Not in training mode: dropout would make π another policy than the one the engine samples from.

    Raises ValueError for a model that does more to its logits than a matrix product (a bias, a scale, a cap).
    """
    config = AutoConfig.from_pretrained(folder)
    full_attention = set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
    attention = "sequence" if full_attention and getattr(config, "sliding_window", None) is None else "sdpa"
    policy = Policy(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention).eval())
    ids, zeros = torch.arange(8), torch.zeros(8)
    with torch.no_grad():
        ours, _ = policy(MicroBatch(ids, ids, ids > 0, zeros, ids, zeros, zeros, None), temperature=1.0)
        policy.lm.set_attn_implementation("sdpa")
        theirs = policy.lm(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)
        policy.lm.set_attn_implementation(attention)
    close = torch.allclose(ours, theirs.float(), atol=0.01 if dtype == torch.float32 else 0.5)
    if policy.lm.get_output_embeddings().bias is not None or not close:
        raise ValueError(f"{folder}: this model does more to its logits than a matrix product, which is not handled")
    return policy.to(device)


def to_device(micro_batch: MicroBatch, device: torch.device) -> MicroBatch:
    if device.type == "cpu":
        return micro_batch
    return MicroBatch(**{k: None if v is None else v.to(device) for k, v in vars(micro_batch).items()})
