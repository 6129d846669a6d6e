"""Break small training runs at random until the time is up: `make soak MINUTES=30`.

Every run has random settings. It is trained once undisturbed, and once while it is killed, asked to
stop, kept from writing and robbed of checkpoints at random moments, and started again each time
with the same command. Both must end in the same bits: weights, averages, state of the optimiser,
best checkpoint and metrics. The seed of a run is printed with its result; `--seed` repeats it.

Before that, runs with `elastic` are killed, asked to stop and resumed with other numbers of
processes: `--resizes=100` times in all, unless two thirds of the time are up before.
"""

import argparse
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "helpers"))
from forked_runs import fork, join, train_forked
from small_runs import last_tensors, metrics, small_config, status, words
from started_runs import start

from vision.checkpoints.native.checkpoint import read_checkpoint
from vision.checkpoints.native.checkpoint_folder import BEST, latest

PREEMPTED = 75
CHOICES: tuple[tuple[str, ...], ...] = (
    ("loader.workers=0", "loader.workers=2"),
    ("ema=null", "ema=0.9"),
    ("augment=none", "augment=deit", "augment=fast"),
    ("precision=fp32", "precision=bf16", "precision=fp16"),
    ("max_batch_per_device=null", "max_batch_per_device=4"),
    ("optimizer.name=adamw", "optimizer.name=muon", "optimizer.name=lamb"),
    ("tune=all", "tune=all", "tune=head", "tune=lora"),
    ("checkpoint.every=4steps", "checkpoint.every=25steps"),
    ("evaluate_every=10steps", "evaluate_every=50steps"),
    ("checkpoint.best=top1", "checkpoint.best=loss"),
    ("model.drop_path=0.0", "model.drop_path=0.2"),
)
MODELS = ("vit_mini", "swin_mini", "swinv2_mini")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
ENDED = {1, PREEMPTED, 128 + signal.SIGINT, -signal.SIGKILL, *(-number for number in SIGNALS)}
"""Exit codes of a disturbed run; a signal before or after the training ends the process itself."""
DURATION = "duration=120steps"
RESIZED = ("elastic=4", "duration=40steps", "checkpoint.every=3steps", "evaluate_every=10steps")
RESIZED_CHOICES: tuple[tuple[str, ...], ...] = tuple(
    choice
    for choice in CHOICES
    if not choice[0].startswith(("loader", "max_batch", "tune", "checkpoint.every", "evaluate"))
)
MOST_STARTS = 25


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--resizes", type=int, default=100)
    parser.add_argument("--seed", type=int, help="repeat the run with this seed")
    arguments = parser.parse_args()
    end = time.monotonic() + 60 * arguments.minutes
    end_of_resizes = end - 20 * arguments.minutes
    seeds = [arguments.seed] if arguments.seed is not None else range(10**9)
    counts, differences = Counter[str](), list[str]()
    for seed in range(10**9 if arguments.seed is None else 0):
        if counts["resizes"] >= arguments.resizes or time.monotonic() > end_of_resizes:
            break
        with tempfile.TemporaryDirectory() as folder:
            found = resize(Path(folder), random.Random(seed), counts)
        counts["elastic runs"] += 1
        differences += [f"elastic, seed {seed}: {difference}" for difference in found]
        after = f"after {counts['resizes']} resizes"
        print(f"elastic, seed {seed}: {'; '.join(found) or 'the same bits'} {after}", flush=True)
    for seed in seeds:
        if time.monotonic() > end:
            break
        with tempfile.TemporaryDirectory() as folder:
            found = soak(Path(folder), random.Random(seed), counts)
        counts["runs"] += 1
        differences += [f"seed {seed}: {difference}" for difference in found]
        print(f"seed {seed}: {'; '.join(found) or 'the same bits'}", flush=True)
    print(", ".join(f"{counts[name]} {name}" for name in sorted(counts)))
    print(f"{len(differences)} differences", *differences, sep="\n  ")
    return 1 if differences else 0


def soak(folder: Path, rng: random.Random, counts: Counter[str]) -> list[str]:
    """Train with random settings, undisturbed and disturbed; what differs."""
    model = rng.choice(MODELS)
    settings = [DURATION, *(rng.choice(choice) for choice in CHOICES)]
    if "tune=head" in settings:  # its features are computed once, without augmentation
        settings = [word for word in settings if not word.startswith(("augment", "model.drop"))]
    whole, broken = folder / "whole", folder / "broken"
    before = time.monotonic()
    if problem := run(whole, settings, model, lambda process: None)[1]:
        return [f"undisturbed run failed ({' '.join(settings)}): {problem}"]
    duration = time.monotonic() - before
    for _ in range(MOST_STARTS):
        kind = rng.choice(list(DISTURBANCES))
        moment = rng.uniform(0.2, 1.0) * duration

        def disturb(process: Any, kind: str = kind, moment: float = moment) -> None:
            deadline = time.monotonic() + moment
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.01)
            if process.poll() is None:
                counts[kind] += 1
                DISTURBANCES[kind](process, broken, rng)

        code, problem = run(broken, settings, model, disturb)
        counts["starts"] += 1
        if code == 0:
            return compare(whole, broken)
        if code not in ENDED:
            return [f"exit code {code} after {kind}: {problem}"]
        if "Traceback" in problem and code != -signal.SIGKILL:
            return [f"traceback after {kind}: {problem[-800:]}"]
    code, problem = run(broken, settings, model, lambda process: None)
    return compare(whole, broken) if code == 0 else [f"it did not end ({code}): {problem}"]


def resize(folder: Path, rng: random.Random, counts: Counter[str]) -> list[str]:
    """Train with virtual ranks: in one process, and in other numbers of them that end early."""
    whole, broken = folder / "whole", folder / "broken"
    settings = [*RESIZED, *(rng.choice(choice) for choice in RESIZED_CHOICES)]
    model = rng.choice(MODELS)
    config = small_config(whole, *settings, model=model)
    if any(join(fork(1, train_forked, config, output=folder / "whole.txt"))):
        return [f"undisturbed run failed: {(folder / 'whole.txt').read_text()[-800:]}"]
    config, before = small_config(broken, *settings, model=model), 0
    for number in range(40):
        processes = rng.choice([size for size in (1, 2, 4) if size != before])
        output, before = folder / f"{number}.txt", processes
        running = fork(processes, train_forked, config, output=output)
        target, kind = rng.randrange(1, 8), rng.choice(("kills", "requests to stop"))
        reached = _step(broken) + target
        while any(process.is_alive() for process in running) and _step(broken) < reached:
            time.sleep(0.002)
        hit = rng.sample(running, rng.randint(1, processes))
        for process in hit if kind == "kills" else running:
            if process.is_alive():
                counts[kind] += 1
                number = signal.SIGKILL if kind == "kills" else rng.choice(SIGNALS)
                os.kill(process.pid or 0, number)
        codes = join(running)
        counts["resizes"] += 1
        if not any(codes):
            return compare(whole, broken)
        if kind != "kills" and set(codes) - {0, *ENDED}:
            return [f"exit codes {codes} after {kind}: {output.read_text()[-800:]}"]
    return ["it did not end"]


def _step(folder: Path) -> int:
    """The number of lines of the log: a step each, and evaluations."""
    file = folder / "run" / "metrics.jsonl"
    return len(file.read_bytes().splitlines()) if file.exists() else 0


def run(
    folder: Path, settings: list[str], model: str, disturb: Callable[[Any], None]
) -> tuple[int, str]:
    """Start the run or resume it; exit code, and the output unless it ended well."""
    process = start(sys.executable, "train.py", *words(folder, *settings, model=model))
    disturb(process)
    output = process.communicate()[0]
    return process.returncode, output if process.returncode else ""


def kill(process: Any, folder: Path, rng: random.Random) -> None:
    """No warning."""
    os.killpg(process.pid, signal.SIGKILL)


def ask(process: Any, folder: Path, rng: random.Random) -> None:
    """A request to stop, as a cluster or a user makes it."""
    process.send_signal(rng.choice(SIGNALS))


def fill(process: Any, folder: Path, rng: random.Random) -> None:
    """No file may grow, as on a full disk."""
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1000, 1000))


def damage(process: Any, folder: Path, rng: random.Random) -> None:
    """A kill, and the newest checkpoint cut short or changed, if there is one before it."""
    kill(process, folder, rng)
    process.wait()
    there = latest(folder / "run" / "checkpoints")
    if len(there) < 2 or status(folder)["status"] == "finished":
        return
    data = bytearray(there[0].read_bytes())
    if rng.random() < 0.5:
        del data[rng.randrange(len(data)) :]
    else:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    there[0].write_bytes(data)


DISTURBANCES: dict[str, Callable[[Any, Path, random.Random], None]] = {
    "kills": kill,
    "requests to stop": ask,
    "full disks": fill,
    "damaged checkpoints": damage,
}


def compare(whole: Path, broken: Path) -> list[str]:
    """What differs between two finished runs."""
    found = []
    pairs = {"last checkpoint": [last_tensors(folder) for folder in (whole, broken)]}
    best = [folder / "run" / "checkpoints" / BEST for folder in (whole, broken)]
    if any(path.exists() for path in best):
        if not all(path.exists() for path in best):
            return ["only one run has a best checkpoint"]
        pairs["best checkpoint"] = [read_checkpoint(path).tensors for path in best]
    for name, (first, second) in pairs.items():
        different = [key for key in first if key not in second or not first[key].equal(second[key])]
        if different or first.keys() != second.keys():
            found.append(f"{name}: {len(different)} of {len(first)} tensors differ")
    for split in ("train", "val", "val_ema"):
        events = [metrics(folder, split) for folder in (whole, broken)]
        for event in (*events[0], *events[1]):
            event.pop("images_per_second", None)
        if events[0] != events[1]:
            found.append(f"metrics of {split} differ")
    return found


if __name__ == "__main__":
    sys.exit(main())
