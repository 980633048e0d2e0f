"""Starting and stopping runs of this machine: `longtune train` as a process of its own, and one SIGTERM to end it.

A started run outlives the page's server. A run is stopped through the process that holds its lock, whoever started it;
the signal is sent once, because a second one would end the run without saving.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from longtune.watch.runs import holder

TRAIN = (sys.executable, "-m", "longtune.cli", "train")
MOST_JOBS = 4
"""Runs started from here that may be at work at the same time."""
KEPT_JOBS = 20
_SHOWN = 8000


class Refused(Exception):
    """It can't be done now; the message says why."""


@dataclass(slots=True)
class Job:
    """One process that was started.

    Attributes:
        what: the config or run, as the page names it.
        process: the process.
        output: what it prints.
    """

    what: str
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    number: int = 0

    def as_dict(self) -> dict[str, Any]:
        code = self.process.poll()
        self.output.flush()
        size = os.fstat(self.output.fileno()).st_size
        text = os.pread(self.output.fileno(), _SHOWN, max(0, size - _SHOWN)).decode(errors="replace")
        return {
            "job": self.number,
            "what": self.what,
            "pid": self.process.pid,
            "running": code is None,
            "exit_code": code,
            "output": text,
        }


@dataclass(slots=True)
class Jobs:
    """The processes that were started here.

    Attributes:
        folder: where they run: paths in a config are looked for there.
        command: what a config's or run's path is appended to.
    """

    folder: Path
    command: Sequence[str] = TRAIN
    _jobs: list[Job] = field(default_factory=list)
    _signalled: set[tuple[int, str]] = field(default_factory=set)
    _started: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self, what: str, path: Path, *options: str) -> Job:
        """Starts a run of a config file, or goes on with a run folder (`--resume`).

        Raises:
            Refused: too many are at work, or this one already is.
        """
        with self._lock:
            at_work = [job for job in self._jobs if job.process.poll() is None]
            if any(job.what == what for job in at_work):
                raise Refused(f"{what} is already at work")
            if len(at_work) >= MOST_JOBS:
                raise Refused(f"{len(at_work)} runs are at work already")
            # Unnamed: it is gone with the last process that has it open.
            output = tempfile.TemporaryFile("w+b", buffering=0)
            process = subprocess.Popen(
                [*self.command, str(path), *options],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C in the server's terminal must not reach the run.
                start_new_session=True,
            )
            self._started += 1
            job = Job(what, process, output, self._started)
            self._jobs.append(job)
            for old in [job for job in self._jobs if job.process.poll() is not None][:-KEPT_JOBS]:
                old.output.close()
                self._jobs.remove(old)
            return job

    def stop(self, run: Path) -> int:
        """Asks the process that writes a run to save and leave; returns its id.

        Raises:
            Refused: nobody writes the run, it was asked already, or it belongs to somebody else.
        """
        with self._lock:
            pid = holder(run).pid
            if pid is None:
                raise Refused("no process of this machine writes this run")
            with _pinned(pid) as pin:
                # Looked up again: the number may have gone to another process in between.
                if holder(run).pid != pid:
                    raise Refused("the run has just ended")
                mark = (pid, _start_time(pid))
                if mark in self._signalled:
                    raise Refused("it was asked already: it saves a checkpoint after the step in work")
                try:
                    if pin is not None:
                        signal.pidfd_send_signal(pin, signal.SIGTERM)
                    else:
                        os.kill(pid, signal.SIGTERM)
                except PermissionError:
                    raise Refused("the run belongs to another user") from None
                except ProcessLookupError:
                    raise Refused("the run has just ended") from None
                self._signalled.add(mark)
            return pid

    def stop_job(self, number: int) -> int:
        """Asks a started process to leave that writes no run yet (it is still loading).

        Raises:
            Refused: there is no such process at work, or it was asked already.
        """
        with self._lock:
            job = next((job for job in self._jobs if job.number == number and job.process.poll() is None), None)
            if job is None:
                raise Refused("it is no longer at work")
            mark = (job.process.pid, _start_time(job.process.pid))
            if mark in self._signalled:
                raise Refused("it was asked already: it saves a checkpoint after the step in work")
            job.process.send_signal(signal.SIGTERM)
            self._signalled.add(mark)
            return job.process.pid

    def listed(self) -> list[dict[str, Any]]:
        """What was started, the newest first."""
        with self._lock:
            return [job.as_dict() for job in reversed(self._jobs)]


@contextlib.contextmanager
def _pinned(pid: int):
    """A handle on the process itself where the system has such, so that the number can't change its meaning."""
    if not hasattr(os, "pidfd_open"):
        yield None
        return
    try:
        pin = os.pidfd_open(pid)
    except ProcessLookupError:
        raise Refused("the run has just ended") from None
    try:
        yield pin
    finally:
        os.close(pin)


def _start_time(pid: int) -> str:
    """Tells two processes of one number apart; empty where the system doesn't say."""
    try:
        # The name in brackets may hold anything, blanks included.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
