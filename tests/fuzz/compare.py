"""The fuzzer's comparison of the tensors of all ranks with those of the reference model.

Bound, in fp64: every sum over ranks is associated differently, 1e-16 of its terms; a few dozen such sums, and five
steps of feeding them back, stay below 1e-12 in the worst of thousands of models. So 1e-10 of a tensor's largest number,
plus 1e-13 of the largest in all tensors of its kind, at least of 1, the size of weights and losses: what is zero by
theory (the gradient of a key's bias without RoPE) is only rounding. AdamW divides by sqrt(v) + eps, which makes an
update of such rounding if eps is small: eps is 1e-3 here, so that an update is at most 1000 lr times as wrong as its
gradient; nothing else of AdamW depends on it.
"""

import contextlib

import torch
import torch.distributed as dist

import tp_ext
from tests.fuzz import plain
from tests.fuzz.mistakes import MISTAKES
from tests.fuzz.train import train

OWN, KIND = 1e-10, 1e-13


def compare(config, mine, group, checker):
    """On rank ``checker``: what is wrong, as text, and the largest error, as its share of the bound and the tensor's
    name; on the others None."""
    p, rank = group.size(), group.rank()
    flat = torch.cat([tensor.flatten() for tensor in mine.tensors.values()])
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(p)]
    dist.all_gather(lengths, torch.tensor([flat.numel()]), group)
    longest = max(int(n) for n in lengths)
    everyone = [flat.new_empty(longest) for _ in range(p)]
    dist.all_gather(everyone, torch.cat([flat, flat.new_zeros(longest - flat.numel())]), group)
    if rank != checker:
        return None
    reference = train(config, plain if config["plain"] else tp_ext, None).whole()
    alone = [name for name in mine.tensors.keys() ^ reference.keys() if not name.startswith("init")]
    if alone:
        return [f"on one side only: {sorted(alone)}"], (float("inf"), "")
    largest = {}
    for name, want in reference.items():
        kind = name.split()[0]
        largest[kind] = max(largest.get(kind, 0.0), float(want.abs().amax()) if want.numel() else 0.0)
    wrong, worst, at = [], (0.0, ""), [0] * p
    for name, tensor in mine.tensors.items():
        sharding = mine.shardings[name]
        shards = []
        for other in range(p):
            shape = list(reference[name].shape) if name in reference else list(tensor.shape)
            if sharding is not None:
                shape[sharding.dim] = sharding.local_size(other, p)
            count = torch.Size(shape).numel()
            shards.append(everyone[other][at[other] : at[other] + count].view(shape))
            at[other] += count
        if name not in reference:  # first weights, which only the library draws
            continue
        bits = not (config["optimizer"]["how"] == "fused" and name.startswith("state") and _has_copies(sharding))
        problem, share = _compared(name, shards, sharding, reference[name], largest[name.split()[0]], bits)
        worst = max(worst, (share, name))
        wrong += [problem] if problem else []
    return wrong, worst


def _has_copies(sharding):
    """torch's fused optimizers on CPU round the last elements of a tensor otherwise than the rest, and copies of a KV
    head may stand at other places on other ranks: then they are equal within the bound only."""
    return sharding is not None and any(part.copies > 1 for part in sharding.parts)


def _compared(name, shards, sharding, want, largest, bits):
    """The problem with one tensor, or None, and the share of the bound that its error takes. ``bits``: what several
    ranks hold is the same to the last bit."""
    p, never = len(shards), float("inf")
    full = shards[0] if sharding is None else sharding.unshard(shards)
    if full.shape != want.shape:
        return f"{name}: shape {tuple(full.shape)}, the reference model's {tuple(want.shape)}", never
    if not want.numel():
        return None, 0.0
    scale = float(want.abs().amax())
    bound = 0.0 if name.startswith("init") else OWN * scale + KIND * max(1.0, largest)
    errors = [float((full - want).abs().amax())]
    for rank, shard in enumerate(shards):
        own = full if sharding is None else sharding.shard(full, rank, p)
        if bits and not torch.equal(shard, own):
            return f"{name}: rank {rank} has other bits than the first that holds it, or padding that is not 0", never
        errors += [float((shard - own).abs().amax())] if shard.numel() else []
    error = max(errors)
    if error <= bound:
        return None, error / bound if bound else 0.0
    return f"{name}: off by {error:.3g}, the reference model's largest is {scale:.3g}, the bound {bound:.3g}", never


def checked(group, configs, mistake=None):
    """[(what is wrong, largest error)] of each configuration, on rank i mod p, which made the reference model."""
    results = []
    for i, config in enumerate(configs):
        with contextlib.nullcontext() if mistake is None else MISTAKES[mistake]():
            mine = train(config, tp_ext, group)
        results.append(compare(config, mine, group, i % group.size()))
    return results
