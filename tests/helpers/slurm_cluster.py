"""A Slurm cluster of two nodes on this machine: real daemons with a folder and a key of their own.

No service, user or file outside of the folder is needed or changed.
"""

import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

NODES = ("127.0.0.1", "127.0.0.2")
"""Names of the nodes: addresses of this machine, so that every program resolves them."""

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol")
PACKAGES = "slurm-wlm and munge (Debian, Ubuntu: sudo apt-get install slurm-wlm munge)"

# A requeued job waits for `cred_expire` seconds, two minutes unless given. Preemption: jobs of
# `urgent` stop jobs of `graceful`, which get a minute to save, and of `abrupt`, which get KillWait.
CONFIGURATION = """
ClusterName=pretend
SlurmctldHost=localhost
SlurmctldPort={controller}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
PlugStackConfig={folder}/plugstack.conf
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=120
SchedulerParameters=bf_interval=2,sched_interval=5
SlurmdParameters=config_overrides
ReturnToService=2
GresTypes=gpu
NodeName={nodes} Port=[{ports}] CPUs=8 Gres=gpu:1
PartitionName=graceful Nodes=ALL PriorityTier=1 GraceTime=60 Default=YES
PartitionName=abrupt Nodes=ALL PriorityTier=1 GraceTime=0
PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""


def missing_programs() -> list[str]:
    """Programs of Slurm and munge that are not installed."""
    return [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"  # where the daemons are, also for users


class SlurmCluster:
    """A running cluster; use it as a context, so that its daemons end with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = os.environ | {
            "PATH": _path(),
            "SLURM_CONF": str(folder / "slurm.conf"),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "SlurmCluster":
        controller, *ports = _free_ports(1 + len(NODES))
        values = {"folder": self.folder, "user": pwd.getpwuid(os.getuid()).pw_name}
        text = CONFIGURATION.format(
            **values, controller=controller, nodes=",".join(NODES), ports=",".join(map(str, ports))
        )
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu0\n")
        for name in ("gpu0", "plugstack.conf"):
            (self.folder / name).touch()
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        munge = [f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "pid", "seed")]
        try:
            socket_file = self.folder / "munge.socket"
            self._start("munged", "--foreground", "--force", *munge, f"--socket={socket_file}")
            wait_until(socket_file.exists, "munged runs", self.log)
            self._start("slurmctld", "-D", "-i")
            for node in NODES:
                self.start_node(node)
            wait_until(lambda: self._idle() == len(NODES), "both nodes are idle", self.log)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if "slurmctld" in self._daemons:
            subprocess.run(["scancel", "--me"], env=self.environment)
        for node in NODES:
            self._kill_processes_of(node)
        for name in reversed(self._daemons):
            self._daemons[name].terminate()
            self._daemons[name].wait(timeout=60)

    def _start(self, *command: str, name: str = "") -> None:
        with (self.folder / "daemons.log").open("a") as log:
            self._daemons[name or command[0]] = subprocess.Popen(
                command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def log(self) -> str:
        """The last lines that the daemons wrote."""
        return "\n".join((self.folder / "daemons.log").read_text().splitlines()[-40:])

    def start_node(self, node: str) -> None:
        """Start the daemon of a node."""
        self._start("slurmd", "-D", "-N", node, name=node)

    def lose_node(self, node: str) -> None:
        """End everything that runs on a node at once, like a power failure."""
        self._daemons[node].kill()
        self._daemons[node].wait()
        self._kill_processes_of(node)
        self.call("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")

    def _kill_processes_of(self, node: str) -> None:
        ours = {f"SLURMD_NODENAME={node}", f"SLURM_CONF={self.environment['SLURM_CONF']}"}
        for process, values in _processes("environ"):
            if ours <= set(values):
                _send(process, signal.SIGKILL)

    def _idle(self) -> int:
        answer = subprocess.run(
            ["sinfo", "--noheader", "--partition=graceful", "--states=idle", "--format=%D"],
            env=self.environment,
            capture_output=True,
            text=True,
        )
        return int(answer.stdout or 0)

    def call(self, *command: str) -> str:
        """Output of a program of Slurm."""
        for _ in range(5):
            answer = subprocess.run(
                command, env=self.environment, capture_output=True, text=True, timeout=60
            )
            if answer.returncode != -signal.SIGPIPE:  # the controller dropped the connection
                break
            time.sleep(1)
        assert answer.returncode == 0, f"{' '.join(command)}: {answer.stderr}"
        return answer.stdout.strip()

    def submit(self, *words: str) -> str:
        """The number of a new job: `sbatch <words>`."""
        return self.call("sbatch", "--parsable", *words)

    def job(self, number: str) -> dict[str, str]:
        """What Slurm knows about a job."""
        words = self.call("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def bring_time_limit_near(self, number: str) -> None:
        """Leave one or two minutes to a job, less than it wants to be warned before its limit; wait
        for the warning. Slurm looks at the limits of its jobs every 30 s.
        """
        hours, minutes, _ = map(int, self.job(number)["RunTime"].split(":"))
        self.set_time_limit(number, hours * 60 + minutes + 2)
        time.sleep(35)

    def set_time_limit(self, number: str, minutes: int) -> None:
        """Change the time limit of a job."""
        self.call("scontrol", "update", f"JobId={number}", f"TimeLimit={minutes}")


def wait_until(true: Callable[[], object], what: str, log: Callable[[], str]) -> None:
    """Wait for something; fail with the log if it takes ten minutes."""
    deadline = time.monotonic() + 600
    while not true():
        assert time.monotonic() < deadline, f"waited in vain until {what}:\n{log()}"
        time.sleep(0.3)


@contextmanager
def paused(folder: Path) -> Iterator[None]:
    """Within, the processes that train in a folder stand still, so that no run ends too early on a
    fast machine. Slurm continues them itself where it ends a job.
    """
    with ExitStack() as stack:
        for process, words in _processes("cmdline"):
            trains = "train.py" in words or "submitit.core._submit" in words
            ours = any(str(folder) in word for word in words)
            if trains and ours and "torch.distributed.run" not in words and "python" in words[0]:
                _send(process, signal.SIGSTOP)
                stack.callback(_send, process, signal.SIGCONT)
        yield


def _processes(kind: str) -> Iterator[tuple[int, list[str]]]:
    """Number of each process, and its words: those of its command line or of its environment."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                yield int(folder.name), (folder / kind).read_text(errors="replace").split("\0")
            except OSError:  # it has ended, or is another user's
                continue


def _send(process: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, number)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("", 0))
        return [each.getsockname()[1] for each in sockets]
