"""Training, from the first step or from the newest checkpoint of a run to its end."""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from io import BytesIO
from pathlib import Path
from typing import Any

from vision.checkpoints.native.checkpoint import open_latest, write_checkpoint
from vision.checkpoints.native.checkpoint_folder import (
    BEST,
    latest,
    mark_best,
    prune,
    recorded_best,
    restore_best,
    step_path,
)
from vision.data.given import GivenImages
from vision.files import make_folder
from vision.terminal import elapsed
from vision.training.configs import TrainConfig
from vision.training.job import TrainingJob, build_job
from vision.training.optim import set_learning_rate
from vision.training.run.distributed import World, world
from vision.training.run.lock import run_lock
from vision.training.run.log import Reporter, check_board
from vision.training.run.memory import memory_advice
from vision.training.run.run_folder import PREEMPTED, Run, RunFileError, better
from vision.training.run.stop import Stopped, StopRequest, say_stopped, stop_requests
from vision.training.run.story import draw_curves, write_csv, write_environment
from vision.training.schedule import lr_at
from vision.training.state import averaged, gather, restore
from vision.training.step import NonFiniteError, explain_nonfinite, forward_backward, update
from vision.training.tasks.probe import probe_config


def train(config: TrainConfig, given: GivenImages | None = None) -> int:
    """Start or resume the training that a config describes. Returns the exit code.

    The config names the run; `given` are the images of data=python.
    """
    with stop_requests() as stop, ExitStack() as until_the_end:
        try:
            with stop.at_once():
                processes = until_the_end.enter_context(world(config.device))
            return _train(config, given, processes, stop, Reporter(processes.main))
        except Stopped:
            say_stopped(_reason(stop))
            return PREEMPTED


def _train(
    config: TrainConfig,
    given: GivenImages | None,
    processes: World,
    stop: StopRequest,
    reporter: Reporter,
) -> int:
    run = Run(Path(config.output, config.name))
    with run_lock(run, processes):
        decision = run.decision(config)
        processes.wait()  # nobody writes into the folder before all have decided
        if decision == "finished":
            reporter.say(f"The run {run.folder} is finished already; see its status.json.")
            return 0
        if config.log.tensorboard:
            check_board()
        init = config.init
        if config.probe_first is not None and not latest(run.checkpoints):
            probe = probe_config(config, run.folder)
            code = _train(probe, given, processes, stop, reporter)
            if code:
                return code
            init = str(Path(probe.output, probe.name))
        with stop.at_once():
            job = build_job(config, run, processes, stop, init, given)
            if decision == "resume":
                _resume(job, reporter)
            elif processes.main:
                run.write("config.json", config.model_dump(mode="json"))
        if processes.main:
            reporter.summarize(job)
        job.task.prepare(job.micro_batch, reporter)
        return _run(job, stop, reporter)


def _resume(job: TrainingJob, reporter: Reporter) -> None:
    """Restore the newest readable checkpoint, and the best one that the run had by then; without
    any, start again.
    """
    state, folder = job.state, job.run.checkpoints
    opened = open_latest(folder)
    if opened is None:
        reporter.warn(f"{job.run.folder} has no checkpoint yet; starting again.")
    else:
        for warning in opened.warnings:
            reporter.warn(warning)
        best_step = recorded_best(folder, opened.checkpoint.record)
        restore(state, opened.checkpoint, best_step, job.config.optimizer.name, job.world.main)
        reporter.say(f"Resuming {job.run.folder} after step {state.step}.")
    job.world.wait()  # all have read what is changed now
    if not job.world.main:
        return
    for warning in job.run.restore_files(job.config):
        reporter.warn(warning)
    job.run.cut_metrics(state.step, state.evaluated)
    if not restore_best(folder, state.best_step):
        assert state.best_step is not None
        reporter.warn(
            f"{step_path(folder, state.best_step)}, the best checkpoint so far, is not there; "
            f"{BEST} is written again when an evaluation is better."
        )


def _run(job: TrainingJob, stop: StopRequest, reporter: Reporter) -> int:
    """The loop, with a log and a status that says how the run ended."""
    with stop.at_once():
        if job.world.main:
            make_folder(job.run.checkpoints)
            reporter.open(job)
        job.world.wait()  # wandb may take its time: all processes can be stopped meanwhile
    if job.world.main:
        job.state.wandb_id = reporter.wandb_run.id if reporter.wandb_run is not None else None
        job.run.mark_latest()
        if job.start.report_lines:
            job.run.write("load_report.json", job.record["load_report"])
        job.set_status("running")
        write_environment(job.run, job.world)
        reporter.start(job)
    code = 1
    try:
        code = _loop(job, stop, reporter)
    except BaseException as error:
        advice = memory_advice(error, job.micro_batch, job.world.device, job.config.elastic)
        failure = advice or error
        with suppress(RunFileError):  # on a full disk the first error is the one to report
            job.set_status("failed", reason=f"{type(failure).__name__}: {failure}")
        if advice is not None:
            raise advice from error
        raise
    finally:
        reporter.close(code)
    return code


def _loop(job: TrainingJob, stop: StopRequest, reporter: Reporter) -> int:
    config, task, schedule, state = job.config, job.task, job.schedule, job.state
    stopping, seconds = False, 0.0
    if state.evaluated < state.step and schedule.due(state.step, schedule.evaluate_every):
        stopping = not _evaluate(job, reporter)  # the run was stopped before that, or in it
        seconds = _save_if_due(job, stopping)
    batches = task.training_batches(
        job.order, state.step * config.batch_size, schedule.total * config.batch_size
    )
    clock = time.perf_counter()
    while state.step < schedule.total and not stopping and not job.stops_early:
        if state.evaluated == state.step and _is_worse_than_bound(job):
            job.set_status("pruned", best=state.best)
            reporter.say(f"Pruned after step {state.step}: earlier trials were better by then.")
            return 0
        parts = [next(batches) for _ in range(job.order.accumulation)]
        if state.step == 0 and config.log.images and job.world.main:
            reporter.image(0, "train/images", task.training_sheet(parts[0]))
        learning_rate = lr_at(state.step, schedule)
        set_learning_rate(state.optimizer, learning_rate)
        sums, finite = forward_backward(task, job.module, parts, state.scaler, state.step)
        stopping, broken = job.world.any(bool(stop), not finite)
        if broken:
            _nonfinite(job, parts, reporter)
        else:
            update(state, config)
            state.sums += sums
        state.step += 1
        if schedule.due(state.step, schedule.log_every):
            clock = _log_training(job, reporter, learning_rate, clock)
        reporter.step(job)
        if schedule.due(state.step, schedule.evaluate_every) and not stopping:
            before = time.perf_counter()
            stopping = not _evaluate(job, reporter)
            clock += time.perf_counter() - before
        seconds = _save_if_due(job, stopping)
    if stopping:  # also after the last step: its evaluation is missing
        return _preempted(job, stop, seconds, reporter)
    reason = state.reason_to_end(config, schedule.total)
    job.set_status("finished", best=state.best, **({"reason": reason} if reason else {}))
    if reason:
        reporter.say(f"Stopped early after step {state.step} of {schedule.total}: {reason}.")
    reporter.finish(job)
    return 0


def _is_worse_than_bound(job: TrainingJob) -> bool:
    """Whether the best value so far is worse than what a search requires at this step."""
    if job.config.prune is None or job.state.best is None:
        return False
    bound = job.config.prune.bound_at(job.state.step / job.schedule.total)
    return bound is not None and better(job.config.checkpoint.best, bound, job.state.best)


def _nonfinite(job: TrainingJob, parts: Sequence[Any], reporter: Reporter) -> None:
    """Report the first non-finite value; then stop, or skip this step."""
    reason = job.world.first(explain_nonfinite(job.task, parts, job.state.step))
    reason = reason or "not again when the step was repeated without gradients"
    message = f"the loss of step {job.state.step + 1} is not a finite number: {reason}."
    job.state.optimizer.zero_grad(set_to_none=True)
    if job.config.on_nonfinite == "stop":
        raise NonFiniteError(
            f"{message} Lower optimizer.learning_rate, set optimizer.clip, choose another "
            "precision, or skip such steps with on_nonfinite=skip."
        )
    reporter.warn(f"{message} The step is skipped.")


def _log_training(
    job: TrainingJob, reporter: Reporter, learning_rate: float, since: float
) -> float:
    """Write the means since the last line; returns the time from which the next ones count."""
    *sums, count = job.world.sum(job.state.sums.clone()).tolist()
    job.state.sums.zero_()
    now = time.perf_counter()
    if count:
        means = {name: total / count for name, total in zip(job.task.measures, sums, strict=True)}
        numbers = {
            "epoch": job.state.step / job.schedule.steps_per_epoch,
            **means,
            "learning_rate": learning_rate,
            "images_per_second": count / max(now - since, 1e-9),
        }
        reporter.training(job, numbers)
    return now


def _evaluate(job: TrainingJob, reporter: Reporter) -> bool:
    """Evaluate the weights and their average; note it if the last of them are the best so far.

    False if a request to stop ended it: nothing is noted then.
    """
    try:
        numbers = _evaluated_numbers(job, reporter)
    except Stopped:
        return False
    state, metric = job.state, job.config.checkpoint.best
    state.evaluated = state.step
    if state.best is None or better(metric, numbers[metric], state.best):
        state.best, state.best_step = numbers[metric], state.step
    state.note_improvement(numbers[metric], job.config)
    return True


def _evaluated_numbers(job: TrainingJob, reporter: Reporter) -> dict[str, float]:
    """Report the numbers of the weights and of their average; returns the last of them."""
    state, task = job.state, job.task
    contexts: dict[str, AbstractContextManager[None]] = {"val": nullcontext()}
    if state.average is not None:
        contexts["val_ema"] = averaged(state.model, state.average)
    for split, weights in contexts.items():
        sheet = None
        batches = -(-len(job.data.val) // job.world.size // job.micro_batch)
        with weights:
            with reporter.evaluating(split, batches) as advance, task.stop.watched(advance):
                numbers = task.evaluate(job.micro_batch)
            if task.drawn is not None or job.config.log.images:
                sheet = task.prediction_sheet(job.micro_batch, state.step)
        if task.drawn is not None and sheet is not None and job.world.main:
            drawn = BytesIO()
            sheet.save(drawn, format="png")
            name = f"{task.drawn}/{split}_{state.step:08d}.png"
            job.run.write_bytes(name, drawn.getvalue())
        reporter.evaluation(job, split, numbers)
        reporter.image(state.step, f"{split}/images", sheet)
    if job.world.main:
        write_csv(job.run)
        if job.config.log.curves:
            draw_curves(job.run)
    if job.schedule.due(state.step, job.schedule.attention_every):
        _draw_attention(job, reporter)
    return numbers


def _draw_attention(job: TrainingJob, reporter: Reporter) -> None:
    """Draw attention maps into the run's folder and for the tracker."""
    from vision.training.run.drawn_attention import draw_attention

    drawn = draw_attention(
        job.state.model,
        job.task.first_validation_images(job.micro_batch).images,
        job.data.train.classes,
        job.data.preprocess,
        job.run.folder,
        job.state.step,
        write=job.world.main,
    )
    for name, image in drawn.items():
        reporter.image(job.state.step, f"attention/{name}", image)


def _save_if_due(job: TrainingJob, stopping: bool) -> float:
    """Write a checkpoint at its interval, at the end (early or not), of the best step and before a
    stop; keep the last ones and the best. Returns the seconds that it took.
    """
    before = time.perf_counter()
    state, schedule = job.state, job.schedule
    improved = state.best_step == state.step
    due = schedule.due(state.step, schedule.checkpoint_every)
    if not (stopping or improved or due or job.stops_early):
        return 0.0
    tensors, record = gather(state, job.world.sum(state.sums.clone()))
    if job.world.main:
        job.run.sync_metrics()  # not later than the checkpoint that its lines lead to
        path = step_path(job.run.checkpoints, state.step)
        evaluated = job.task.evaluated_record() if state.evaluated == state.step else {}
        write_checkpoint(path, tensors, {**record, **job.record, **evaluated})
        if improved:
            mark_best(path)
        prune(job.run.checkpoints, job.config.checkpoint.keep, state.step)
    job.run.store_unreadable(job.world.rank, job.task.unreadable())
    job.world.wait()
    return time.perf_counter() - before


def _preempted(job: TrainingJob, stop: StopRequest, seconds: float, reporter: Reporter) -> int:
    job.set_status("preempted", signal=stop.signal)
    reporter.say(
        f"Stopped after step {job.state.step} ({_reason(stop)}); "
        f"saving took {elapsed(seconds)} (torchrun waits 30 s after a signal). "
        f"The same command resumes the run."
    )
    return PREEMPTED


def _reason(stop: StopRequest) -> str:
    return stop.signal or "signal to another process"
