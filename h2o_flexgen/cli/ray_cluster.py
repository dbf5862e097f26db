"""A cluster of Ray for a job: one of the job's own on this machine, which ends with it, or one that runs."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import ray

from h2o_flexgen.checkpoints.stale_files import RAY_PREFIX, held_folder
from h2o_flexgen.cli.batch_request import LOCAL, RAY, WORKERS, RayRequest
from h2o_flexgen.core.environment import cores, folder_of_sockets
from h2o_flexgen.core.hints import one_line
from h2o_flexgen.engine.resources import quota_cores, threads_beside

LONGEST_REASON = 400  # characters
LOOPBACK = "127.0.0.2"  # Ray takes localhost for the machine's address in its network
STORE_BYTES = 1 << 28  # of texts and records on their way; more goes through files


@dataclass(frozen=True)
class Pool:
    """Workers, and what each of them is given."""

    workers: int
    cpus: int
    gpus: int
    machines: int

    def __str__(self) -> str:
        gpu = " and a GPU" if self.gpus else ""
        machines = "this machine" if self.machines == 1 else f"{self.machines} machines"
        return f"{self.workers} on {machines}, each with {self.cpus} core{'s' * (self.cpus > 1)}{gpu}"


def local_threads(asked: RayRequest, threads: int | None, busy_cores: float) -> int:
    """The threads of each worker on this machine: those that were asked for, or a share of the cores that are free."""
    free = threads_beside(busy_cores, cores(), quota_cores(), cores())
    return threads or max(1, free // (asked.workers or 1))


@contextmanager
def connected(asked: RayRequest, threads: int | None, busy_cores: float = 0.0) -> Iterator[Pool]:
    """A context in which there are workers: on a cluster of this machine alone, or on the one that was joined. `busy_cores` are
    those that other processes keep busy on this machine."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    if asked.address == LOCAL:
        threads = local_threads(asked, threads, busy_cores)
        with _of_this_machine((asked.workers or 1) * threads):
            yield _pool(asked, threads)
    else:
        yield _pool(asked, threads)


@contextmanager
def joined(address: str) -> Iterator[None]:
    """A context in which a cluster that runs is joined. It is for the main thread, which a signal can interrupt: an address at
    which nothing answers keeps Ray waiting for minutes, and nothing has been started that could be left behind."""
    if address == LOCAL:
        yield
        return
    failed = f"{RAY} {address} cannot be joined", f"give the address of a cluster, or {LOCAL}"
    with _told_in_one_line(*failed), _own_answer_to_sigterm():
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _own_answer_to_sigterm() -> Iterator[None]:
    """A context in which Ray may begin. It answers SIGTERM by SystemExit from then on; this process's own answer stays."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit:
        signal.signal(signal.SIGTERM, before)
        signal.raise_signal(signal.SIGTERM)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def answer_sigterm_again() -> None:
    """Makes this process's own answer to SIGTERM valid again. Ray's library takes its place, unseen by Python, when Ray begins
    in whatever thread."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


@contextmanager
def waiting() -> Iterator[None]:
    """A context in which the main thread waits for Ray. If a signal was heard by Ray's library first, that has set an alarm,
    which aborts the process although it is about to end by itself: it is taken back."""
    try:
        yield
    except KeyboardInterrupt:
        answer_sigterm_again()
        signal.alarm(0)
        raise


@contextmanager
def _of_this_machine(cpus: int) -> Iterator[None]:
    with held_folder(RAY_PREFIX, folder_of_sockets()) as folder:
        try:
            with _told_in_one_line("Ray cannot start on this machine", "leave out --ray, or try again when it is less busy"):
                ray.init(
                    LOCAL,
                    num_cpus=cpus,
                    include_dashboard=False,
                    object_store_memory=STORE_BYTES,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    _temp_dir=str(folder),
                    _node_ip_address=LOOPBACK,
                )
            yield
        finally:
            ray.shutdown(wait_for_processes=True)


@contextmanager
def _told_in_one_line(what: str, mending: str) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise ValueError(f"{what} ({one_line(error)[:LONGEST_REASON]}); {mending}") from error


def _pool(asked: RayRequest, threads: int | None) -> Pool:
    """The workers that fit the cluster."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    workers = asked.workers or len(nodes)
    cpus = threads or max(1, int(min(node["CPU"] for node in nodes)) // -(-workers // len(nodes)))
    gpus = int(asked.may_use_gpus and sum(int(node.get("GPU", 0)) for node in nodes) >= workers)
    room = sum(min(int(node["CPU"]) // cpus, int(node.get("GPU", 0)) if gpus else workers) for node in nodes)
    if room < workers:
        has = f"the cluster has room for {room} with {cpus} cores each{' and a GPU' if gpus else ''}"
        raise ValueError(f"{WORKERS} is {workers}, but {has}; ask for fewer, or for fewer --threads")
    return Pool(workers, cpus, gpus, len(nodes))
