"""Several processes of one training run, one for each GPU, started by `torchrun`.

    torchrun --nproc-per-node 4 scripts/train/train_head.py …

Each process draws its own windows. After the backward pass a gradient is the mean over processes.
The first process alone prints, evaluates, decides when to stop, and writes files.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn


def join() -> int:
    """Joins the processes that torchrun started; returns this one's rank, 0 for a single one.

    Call it before the first use of CUDA: from then on the process sees its own GPU alone.
    """
    local = os.environ.pop("LOCAL_RANK", None)  # transformers' Trainer would wrap the model
    if local is None:
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[int(local)] if visible else local
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if dist.get_rank() > 0:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    return dist.get_rank()


def leave() -> None:
    """Waits for all processes first: one that ends early breaks the others' last broadcast."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def count() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """From now on, a backward pass leaves the mean over processes in `grad`."""
    if count() == 1:
        return

    def average(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.div_(count())
        dist.all_reduce(parameter.grad)

    for parameter in parameters:
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(average)


def from_first(value: float, device: torch.device) -> float:
    """The first process's `value`."""
    if count() == 1:
        return value
    shared = torch.tensor([value], dtype=torch.float64, device=device)
    dist.broadcast(shared, 0)
    return float(shared)
