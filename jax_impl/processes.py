"""Several processes: who they are, how one joins the others, and what it reports meanwhile.

`launch` is the one entry. The process that the user (or SLURM) starts becomes a launcher: it runs
the same command again as its worker and watches it (`jax_impl.watchdog`). The worker joins the
others with JAX, does the work and calls `report` as it goes. JAX is imported by `join` only.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from jax_impl.problems import listed

WORKER_VARIABLE = "K3_WORKER_STATUS_FD"  # marks a worker; its value is the pipe to the launcher
BEAT_S = 1.0
COMPILING = 1800.0  # `allow` of a report before a step that is compiled first
JOINING = 120.0
LINGER_S = 10.0
JAX_TIMEOUT_S = 3600  # JAX's own limits: long, so that the watchdog's message comes first
# Below this the kernel hands ports to outgoing connections; two ports per run are needed above it.
SLURM_PORTS = (61440, 2047)


class ProcessError(ValueError):
    """Options or surroundings that do not make a set of processes; lists all that is wrong."""


@dataclass(frozen=True)
class ProcessOptions:
    """Several processes; under SLURM (srun) the first three are filled in.

    Attributes:
        coordinator: HOST:PORT of process 0; PORT and PORT+1 must be free there.
        num_processes: how many processes there are in all.
        process_id: number of this process, 0 to num_processes - 1.
        local_devices: devices per process: emulated where JAX runs on a CPU, checked elsewhere.
        start_timeout: seconds within which all processes must have started.
        stall_timeout: seconds that all may stay in one step before the run is given up.
    """

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    local_devices: int | None = None
    start_timeout: float = 50.0
    stall_timeout: float = 45.0


ONE_PROCESS = ProcessOptions()


@dataclass(frozen=True)
class Processes:
    """One process's place among all.

    Attributes:
        coordinator: HOST:PORT on which process 0 coordinates JAX; the watchdog uses PORT + 1.
        number: how many processes there are.
        index: number of this one.
    """

    coordinator: str
    number: int
    index: int

    @property
    def hub(self) -> tuple[str, int]:
        """Host and port at which the launcher of process 0 takes the others' reports."""
        host, port = self.coordinator.rsplit(":", 1)
        return host.strip("[]"), int(port) + 1


def find_processes(
    options: ProcessOptions, environ: Mapping[str, str] | None = None
) -> Processes | None:
    """The processes that options, or SLURM for those not given, describe; None: just this one.

    Raises:
        ProcessError: listing everything that is missing or out of range.
    """
    problems = [
        f"--{name.replace('_', '-')}: found {value}, expected more than 0"
        for name in ("start_timeout", "stall_timeout", "local_devices")
        if (value := getattr(options, name)) is not None and not value > 0
    ]
    given = {
        "--coordinator": options.coordinator,
        "--num-processes": options.num_processes,
        "--process-id": options.process_id,
    }
    if any(v is None for v in given.values()):
        from_slurm = _slurm(os.environ if environ is None else environ, given, problems)
        given = {k: from_slurm.get(k) if v is None else v for k, v in given.items()}
    missing = [k for k, v in given.items() if v is None]
    if 0 < len(missing) < len(given):
        problems.append(
            f"found {', '.join(k for k in given if k not in missing)} without "
            f"{', '.join(missing)}; give all three, or none for a single process"
        )
    if not missing:
        problems += _out_of_range(*given.values())
    if problems:
        raise ProcessError(
            listed("processes", problems, "Change these; docs/multi_process.md has runs.")
        )
    if missing or given["--num-processes"] == 1:
        return None
    return Processes(*given.values())  # type: ignore[arg-type]


def _out_of_range(coordinator: Any, number: Any, index: Any) -> list[str]:
    problems = []
    match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^:\s\[\]/]+):([0-9]+)", coordinator)
    if match is None or not 0 < int(match[2]) < 65535:
        problems.append(
            f"--coordinator: found {coordinator!r}, expected HOST:PORT with a port of 1..65534 "
            "(the one above it is used too)"
        )
    if number < 1:
        problems.append(f"--num-processes: found {number}, expected at least 1")
    elif not 0 <= index < number:
        problems.append(f"--process-id: found {index}, expected 0..{number - 1}")
    return problems


def _slurm(
    environ: Mapping[str, str], given: dict[str, Any], problems: list[str]
) -> dict[str, Any]:
    """What srun says of its tasks; empty outside srun (a batch script has no step) and for one."""
    if "SLURM_STEP_NODELIST" not in environ or "SLURM_PROCID" not in environ:
        return {}
    tasks = environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", "1"))
    names = ("SLURM_PROCID", "SLURM_JOB_ID", "SLURM_STEP_ID")
    index, job, step = (environ.get(n, "0") for n in names)
    wrong = [
        f"{name}: found {value!r}, expected a number"
        for name, value in zip(
            ("SLURM_STEP_NUM_TASKS", *names), (tasks, index, job, step), strict=True
        )
        if not (value.isascii() and value.isdecimal())
    ]
    # Process 0 is on the step's first host; the launch node may be a login node.
    listed = environ["SLURM_STEP_NODELIST"]
    first = re.match(r"([^,\[\]\s]+)(?:\[(\d+)[^\]]*\]([^,\[\]]*))?(?:,|$)", listed)
    if first is None:
        wrong.append(f"SLURM_STEP_NODELIST: found {listed!r}, expected host names")
    if wrong:
        problems += [f"{w}; or give --coordinator, --num-processes, --process-id" for w in wrong]
        return {}
    if int(tasks) == 1 and all(v is None for v in given.values()):
        return {}
    host = "".join(part or "" for part in first.groups())  # type: ignore[union-attr]
    base, count = SLURM_PORTS
    port = base + 2 * ((int(job) + int(step)) % count)
    return {
        "--coordinator": f"{host}:{port}",
        "--num-processes": int(tasks),
        "--process-id": int(index),
    }


class _State:
    """What this process is; the one piece of module state, for a process is one worker."""

    processes: Processes | None = None
    reporter: _Reporter | None = None


def is_first() -> bool:
    """Whether this process prints results and writes files: process 0, or the only one."""
    return _State.processes is None or _State.processes.index == 0


def report(step: int | None, doing: str, *, allow: float = 0.0) -> None:
    """Say what this process does or waits for from now on; cheap, and nothing when not watched.

    Args:
        step: decode step; None before the first.
        doing: in words, such as "waiting for tokens".
        allow: seconds that this may take; 0: the stall timeout (half an hour without a step).
    """
    if _State.reporter is not None:
        _State.reporter.update(step=step, doing=doing, allow=allow)


def launch(
    options: ProcessOptions, work: Callable[[], int], command: list[str] | None = None
) -> int:
    """Do `work` here, or in a watched worker of this and every other process.

    Standard output of all but process 0 goes nowhere; files are the business of `is_first`.

    Args:
        options: which processes there are.
        work: returns the exit status.
        command: starts the worker; None: the command line that started this process.

    Returns:
        The exit status: of `work`, or 3 where the watchdog ended the run.

    Raises:
        ProcessError: bad options.
    """
    processes = find_processes(options)
    if processes is None:
        if options.local_devices is not None:
            use_local_devices(options.local_devices)
            require_local_devices(options.local_devices)
        return work()
    fd = os.environ.pop(WORKER_VARIABLE, None)  # not for the worker's own children
    if fd is None:
        from jax_impl.watchdog import run_supervised

        return run_supervised(processes, options, command)
    _State.processes = processes
    _State.reporter = reporter = _Reporter(int(fd))
    reporter.start()
    _redirect_stdout()
    try:
        join(processes, options.local_devices)
        status = work()
    except BaseException as error:
        _leave_after(error, reporter)
        raise
    # Exiting, JAX waits for the other processes: none is cut off before it has finished.
    reporter.update(doing="finished", finished=True)
    return status


def join(processes: Processes, local_devices: int | None = None) -> None:
    """Make this process one of JAX's; before anything that uses a device.

    Raises:
        ProcessError: another number of devices than asked for.
    """
    report(None, "joining the other processes", allow=JOINING)
    import jax

    use_local_devices(local_devices)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        coordinator_address=processes.coordinator,
        num_processes=processes.number,
        process_id=processes.index,
        # under SLURM JAX would otherwise give each process one device only
        cluster_detection_method="deactivate",
        initialization_timeout=JAX_TIMEOUT_S,
        heartbeat_timeout_seconds=JAX_TIMEOUT_S,
        shutdown_timeout_seconds=JAX_TIMEOUT_S,
    )
    mine = [i for i, d in enumerate(jax.devices()) if d.process_index == processes.index]
    if local_devices is not None:
        require_local_devices(local_devices)
    # The connections of the first exchange are given 30 s on a CPU, and compile times differ by
    # more than that: make them now, while all processes are at the same place.
    _exchange_once()
    if _State.reporter is not None:
        # what comes next may take as long as anything outside a step
        _State.reporter.update(ranks=(mine[0], mine[-1]), doing="joined", allow=0.0)


def _exchange_once() -> None:
    """A sum over all devices of all processes."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    devices = jax.devices()
    laid = NamedSharding(Mesh(np.array(devices), ("all",)), PartitionSpec("all"))
    ones = jax.make_array_from_callback((len(devices),), laid, lambda _: np.ones(1, np.float32))
    whole = NamedSharding(laid.mesh, PartitionSpec())
    jax.jit(jnp.sum, out_shardings=whole)(ones).block_until_ready()


def use_local_devices(number: int | None) -> None:
    """Emulate `number` devices where JAX runs on a CPU; before JAX's first use of a device."""
    if number is None:
        return
    import jax

    with suppress(RuntimeError):  # devices are in use already: `require_local_devices` tells
        jax.config.update("jax_num_cpu_devices", number)


def require_local_devices(number: int) -> None:
    """Check that this process has `number` devices.

    Raises:
        ProcessError: it has not.
    """
    import jax

    found = jax.local_device_count()
    if found != number:
        raise ProcessError(
            f"--local-devices {number}: found {found} {jax.default_backend()} device(s) in this "
            "process; choose the visible ones (CUDA_VISIBLE_DEVICES, srun --gpus-per-task), or "
            "leave the option out"
        )


def _redirect_stdout() -> None:
    """Process 0 alone prints, and only what Python prints: Gloo writes to standard output too."""
    sys.stdout.flush()
    if is_first():
        sys.stdout = os.fdopen(
            os.dup(1),
            "w",
            buffering=1 if sys.stdout.line_buffering else -1,
            encoding=sys.stdout.encoding,
            errors=sys.stdout.errors,
        )
        os.dup2(2, 1)
    else:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)


def _leave_after(error: BaseException, reporter: _Reporter) -> None:
    """Arrange that this process ends with its error instead of waiting for the others.

    JAX, when a process exits, waits for all others, which never come to their end. The hook runs
    before JAX's, after the error was printed, and keeps the process alive until the launcher ends
    it: were process 0 to vanish first, JAX would abort the others over its own message.
    """
    said = str(error).strip() or type(error).__name__
    status = 2 if isinstance(error, ValueError | OSError) else 1
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else 1
    if status:
        reporter.update(error=f"{type(error).__name__}: {said}"[:450])

    def leave() -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        reporter.update(status=status)
        time.sleep(LINGER_S if status else 0)
        os._exit(status)

    atexit.register(leave)


class _Reporter(threading.Thread):
    """Sends this worker's state to its launcher: at every change, and every second as a beat."""

    def __init__(self, fd: int) -> None:
        super().__init__(name="k3 heartbeat", daemon=True)
        os.set_inheritable(fd, False)
        os.set_blocking(fd, False)
        self._fd, self._lock = fd, threading.Lock()
        self._state: dict[str, Any] = {
            **{"serial": 0, "ranks": None, "step": None, "doing": "starting", "allow": 0.0},
            **{"finished": False, "error": "", "status": None},
        }

    def update(self, **changed: Any) -> None:
        with self._lock:
            self._state.update(changed, serial=self._state["serial"] + 1)
        self._send()

    def run(self) -> None:
        while self._send():
            time.sleep(BEAT_S)
        print(
            "k3: the launcher of this process is gone, and with it the watchdog; this worker ends "
            f"too. Last: step {self._state['step']}, {self._state['doing']}",
            file=sys.stderr,
            flush=True,
        )
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(3)

    def _send(self) -> bool:
        """False when nobody reads any more. Below 4 KiB, so written at once or not at all."""
        with self._lock:
            state = self._state | {"doing": self._state["doing"][:150]}
            try:
                os.write(self._fd, json.dumps(state).encode() + b"\n")
            except BlockingIOError:
                return True  # the launcher is behind; a later beat says the same
            except OSError:
                return False
        return True
