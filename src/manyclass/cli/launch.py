"""The processes that torchrun has started."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import click

from manyclass.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from manyclass.training import Ranks

F = TypeVar("F", bound=Callable[..., Any])

# In the messages of an exchange that failed, whose exceptions have no type to tell them from others.
_LOST = ("Connection closed", "Connection reset", "Timed out", "timed out", "Broken pipe", "Socket")


class LostProcessError(UserError):
    """An exchange that another process did not join."""


_PORT = "manyclass/port"
_TRY = timedelta(seconds=2)  # to connect to a port


def timeout_option() -> Callable[[F], F]:
    """Return the option of the time that a process waits for others."""
    seconds = click.FloatRange(min=0, min_open=True)
    help = "Under torchrun: seconds after which a process that waits for another one ends with an error."
    option: Callable[[F], F] = click.option("--timeout", type=seconds, default=600.0, show_default=True, help=help)
    return option


def number_of_processes() -> int:
    """Return the number of processes that torchrun has started for this command; 1 without it."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def this_rank() -> int:
    """Return the rank of this process; 0 without torchrun."""
    return int(os.environ["RANK"]) if number_of_processes() > 1 else 0


@contextmanager
def all_ranks(device: str | None, timeout: float) -> Iterator["Ranks"]:
    """Join the processes that torchrun has started; without it, there is this process alone.

    Args:
        device: the device that the user has chosen, if any; "cuda" is then the GPU of this process.
        timeout: seconds that a process waits for another one.

    Raises:
        UserError: there is no GPU for this process.
        LostProcessError: another process was lost.
    """
    from manyclass.training import ALONE, Ranks

    number = number_of_processes()
    if number == 1:
        yield ALONE
        return
    import torch
    import torch.distributed as dist

    _choose_gpu(device, int(os.environ["LOCAL_RANK"]))
    longest = timedelta(seconds=timeout)
    joined = not dist.is_initialized()
    if joined:
        rank = int(os.environ["RANK"])
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            store=_new_store(rank, longest),
            rank=rank,
            world_size=number,
            timeout=longest,
        )
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), longest)
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not any(sign in str(error) for sign in _LOST):
            raise
        reason = str(error).splitlines()[0]
        raise LostProcessError(f"another process was lost, or did not answer within {timeout:g} s: {reason}") from error
    # Not after an error: it would wait for processes that may have ended.
    if joined:
        dist.destroy_process_group()


def _new_store(rank: int, timeout: timedelta) -> "Store":
    """Return a store of these processes alone.

    torchrun's store outlives them: after a restart it still has the addresses of the processes that have ended, and
    the first of the new ones would try to connect to them. So the first rank serves a new store, and torchrun's has
    its port; the port of a process that has ended refuses connections.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torch.distributed.rendezvous import rendezvous

    shared, _, _ = next(rendezvous("env://", timeout=timeout))
    host = os.environ["MASTER_ADDR"]
    if rank == 0:
        own = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        shared.set(_PORT, str(own.port))
        return own
    until = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            own = TCPStore(host, int(shared.get(_PORT)), is_master=False, timeout=_TRY)
        except RuntimeError:
            if time.monotonic() > until:
                raise
            continue
        own.set_timeout(timeout)
        return own


def report_failure(message: str) -> None:
    """Let torchrun show a message in its summary, as the reason why this process failed."""
    if number_of_processes() > 1:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        try:
            # torchrun shows the traceback of the exception that is handled.
            raise UserError(message)
        except UserError as error:
            get_error_handler().record_exception(error)


def _choose_gpu(device: str | None, local_rank: int) -> None:
    """Make "cuda" the GPU with the number of this process on its machine."""
    import torch

    kind, _, index = (device or "").partition(":")
    if index:
        raise UserError(f"`--device` must be cpu or cuda under torchrun, where each process has its GPU, got {device}")
    gpus = torch.cuda.device_count()
    if kind == "cuda" and local_rank >= gpus:
        raise UserError(f"`--nproc-per-node` of torchrun must be at most the number of GPUs, {gpus}, got more")
    if local_rank < gpus:
        torch.cuda.set_device(local_rank)
