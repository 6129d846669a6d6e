"""Training, from the first step or from where a run stands to its end: `train(config)`."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress

from vision.checkpoints.native.checkpoint import open_latest, write_checkpoint
from vision.checkpoints.native.checkpoint_folder import mark_best, prune, step_path
from vision.data.batches import evaluation_batches, training_batches
from vision.data.loader import Batch
from vision.evaluation.evaluate import evaluate
from vision.models.layers import Classifier
from vision.terminal import elapsed
from vision.training.configs import TrainConfig
from vision.training.ema import averaged, decay_at, unwrapped, update_average
from vision.training.job import Job, build_job
from vision.training.optim import set_learning_rate
from vision.training.run.distributed import World, world
from vision.training.run.lock import held
from vision.training.run.log import Log, start_wandb
from vision.training.run.memory import memory_advice
from vision.training.run.messages import Reporter
from vision.training.run.run_folder import (
    PREEMPTED,
    RunFileError,
    StopRequest,
    better,
    open_run,
    stop_requests,
)
from vision.training.run.samples import prediction_sheet, training_sheet
from vision.training.schedule import lr_at
from vision.training.state import gather, restore
from vision.training.step import NonFiniteError, explain_nonfinite, forward_backward, update
from vision.training.tasks.features import caches, use_features
from vision.training.tasks.probe import probe_before


def train(config: TrainConfig, label: str) -> int:
    """Run, or go on with, the training that a config describes. Returns the exit code.

    `label` names the model and the data in the name of a run that has none of its own.
    """
    with stop_requests() as stop, world(config.device) as processes:
        reporter = Reporter(processes.main)
        probe = probe_before(config, label)
        if probe is None:
            return _phase(config, label, processes, stop, reporter)
        code = _phase(probe, label, processes, stop, reporter)
        if code:
            return code
        source = str(open_run(probe, label)[0].folder)
        return _phase(config, label, processes, stop, reporter, source)


def _phase(
    config: TrainConfig,
    label: str,
    processes: World,
    stop: StopRequest,
    reporter: Reporter,
    source: str | None = None,
) -> int:
    """One run. `source` is where its weights come from in place of what the config says."""
    run, decision = open_run(config, label)
    finished = processes.from_main(decision) == "finished"
    lock = nullcontext("") if finished else held(run.folder, processes)
    with lock as warning:
        if warning:
            reporter.warn(warning)
        _, decision = open_run(config, label)  # from here on nobody else changes it
        processes.wait()  # nobody writes into the folder before all have looked
        if decision == "finished":
            reporter.say(f"The run {run.folder} is finished already; see its status.json.")
            return 0
        job = build_job(config, run, processes, source)
        if decision == "resume":
            _resume(job, reporter)
        elif processes.main:
            run.store_settings(config)
        if config.attention_every is not None:
            from vision.training.run.drawn_attention import check_attention

            check_attention(_classifier(job), job.preprocess)
        if caches(config):
            reporter.say(f"Features: {use_features(job, reporter.counting)}.")
        return _run(job, stop, reporter)


def _resume(job: Job, reporter: Reporter) -> None:
    """Put the newest readable checkpoint into the job; without one, start again."""
    opened = open_latest(job.run.checkpoints)
    if opened is None:
        reporter.warn(f"{job.run.folder} has no checkpoint yet; starting again.")
    else:
        for warning in opened.warnings:
            reporter.warn(warning)
        restore(job.state, opened.checkpoint, job.world.main)
        job.state.notes["wandb"] = opened.checkpoint.record["wandb"]
        job.started -= opened.checkpoint.record.get("seconds", 0.0)
        reporter.say(f"Resuming {job.run.folder} after step {job.state.step}.")
    job.world.wait()
    if job.world.main:
        job.run.cut_metrics(job.state.step)


def _run(job: Job, stop: StopRequest, reporter: Reporter) -> int:
    """The loop with everything around it: log, status, what happens when it fails."""
    config, state = job.config, job.state
    log = None
    if job.world.main:
        job.run.checkpoints.mkdir(parents=True, exist_ok=True)
        tracker = start_wandb(
            config.log,
            job.run.folder.name,
            job.run.folder,
            config.model_dump(mode="json"),
            state.notes.get("wandb"),
        )
        state.notes["wandb"] = tracker.id if tracker is not None else None
        job.run.mark_latest()
        if job.load_report:
            job.run.store_load_report(state.notes["load_report"])
        job.run.set_status("running", state.step, **job.standing)
        log = Log(job.run.metrics, tracker)
        reporter.start(job)
    code = 1
    try:
        with memory_advice(job.micro_batch, job.world.device):
            code = _loop(job, log, stop, reporter)
    except BaseException as error:
        if job.world.main:
            reason = f"{type(error).__name__}: {error}"
            with suppress(RunFileError):  # on a full disk: what failed first is the news
                job.run.set_status("failed", state.step, **job.standing, reason=reason)
        raise
    finally:
        reporter.close()
        if log is not None:
            log.close(code)
    return code


def _loop(job: Job, log: Log | None, stop: StopRequest, reporter: Reporter) -> int:
    state, plan, config = job.state, job.plan, job.config
    if state.evaluated < state.step and plan.evaluates_after(state.step):
        _evaluate(job, log, reporter)  # the run was stopped between the step and its evaluation
    batches = training_batches(
        job.train_loader, job.order, state.step * config.batch_size, plan.total * config.batch_size
    )
    job.train_mode()
    clock = time.perf_counter()
    while state.step < plan.total:
        parts = [next(batches) for _ in range(job.order.accumulation)]
        if state.step == 0 and log is not None and job.shows_images:
            log.image(0, "train/images", training_sheet(job, parts[0]))
        learning_rate = lr_at(state.step, plan)
        set_learning_rate(state.optimizer, learning_rate)
        sums, finite = forward_backward(job.module, parts, job.setup, state.scaler, state.step)
        stopping, broken = job.world.any(bool(stop), not finite)
        if broken:
            _nonfinite(job, parts, reporter)
        else:
            update(state.model, state.optimizer, state.scaler, config.optimizer)
            state.sums += sums
            if state.average is not None and config.ema is not None:
                update_average(state.average, state.model, decay_at(state.step, config.ema))
        state.step += 1
        if plan.logs_after(state.step):
            clock = _log_training(job, log, reporter, learning_rate, clock)
        reporter.step(job)
        if plan.evaluates_after(state.step) and not stopping:
            before = time.perf_counter()
            _evaluate(job, log, reporter)
            clock += time.perf_counter() - before
        if stopping or job.improved or plan.saves_after(state.step):
            seconds = _save(job)
            if stopping and state.step < plan.total:
                return _preempted(job, stop, seconds, reporter)
    if job.world.main:
        job.run.set_status("finished", state.step, **job.standing, best=state.best)
        reporter.finish(job)
    return 0


def _nonfinite(job: Job, parts: list[Batch], reporter: Reporter) -> None:
    """Say what gave the first number that is none; then stop, or go on without this step."""
    step = job.state.step + 1
    reason = job.world.first(explain_nonfinite(job.evaluated[0], parts, job.setup, job.state.step))
    reason = reason or "not again when the step was repeated without gradients"
    message = f"the loss of step {step} is not a finite number: {reason}."
    job.state.optimizer.zero_grad(set_to_none=True)
    if job.config.on_nonfinite == "stop":
        raise NonFiniteError(
            f"{message} Lower optimizer.learning_rate, set optimizer.clip, choose another "
            "precision, or on_nonfinite=skip to leave such steps out."
        )
    reporter.warn(f"{message} The step is left out.")


def _log_training(
    job: Job, log: Log | None, reporter: Reporter, learning_rate: float, since: float
) -> float:
    """Write the means since the last line; returns the time from which the next ones count."""
    loss, correct, count = job.world.sum(job.state.sums.clone()).tolist()
    job.state.sums.zero_()
    now = time.perf_counter()
    if log is not None and count:
        numbers = {
            "epoch": job.state.step / job.plan.steps_per_epoch,
            "loss": loss / count,
            "top1": correct / count,
            "learning_rate": learning_rate,
            "images_per_second": count / max(now - since, 1e-9),
        }
        log.write(job.state.step, "train", numbers)
        reporter.training(job, numbers)
    return now


def _evaluate(job: Job, log: Log | None, reporter: Reporter) -> None:
    """Evaluate the weights, and their average; note whether they are the best so far."""
    state = job.state
    model, preprocess = job.evaluated
    contexts: dict[str, AbstractContextManager[None]] = {"val": nullcontext()}
    if state.average is not None:
        contexts["val_ema"] = averaged(state.model, state.average)
    for split, weights in contexts.items():
        first: list[Batch] = []
        reporter.evaluating(job)
        with weights:
            numbers = evaluate(
                model,
                _validation(job, first),
                preprocess,
                job.setup.classes,
                job.world.device,
                job.config.precision,
                reduce=job.world.sum,
                channels_last=job.config.channels_last,
            )
            sheet = prediction_sheet(job, first[0]) if job.shows_images else None
        if log is not None:
            log.write(state.step, split, numbers)
            if sheet is not None:
                log.image(state.step, f"{split}/images", sheet)
        reporter.evaluation(job, split, numbers)
    if job.plan.draws_after(state.step):
        _draw(job, log, first[0])
    value = numbers[job.config.checkpoint.best]  # of the average, if there is one
    state.evaluated = state.step
    job.improved = state.best is None or better(job.config.checkpoint.best, value, state.best)
    if job.improved:
        state.best = value


def _draw(job: Job, log: Log | None, batch: Batch) -> None:
    """Images of where the model looks, into the run's folder and to the tracker."""
    from vision.training.run.drawn_attention import draw_attention

    classes = job.state.notes["classes"]
    drawn = draw_attention(
        _classifier(job),
        batch.images,
        classes,
        job.preprocess,
        job.run.folder,
        job.state.step,
        write=job.world.main,
    )
    if log is not None:
        for name, image in drawn.items():
            log.image(job.state.step, f"attention/{name}", image)


def _classifier(job: Job) -> Classifier:
    model = unwrapped(job.state.model)
    assert isinstance(model, Classifier)
    return model


def _validation(job: Job, first: list[Batch]) -> Iterator[Batch]:
    """This process's batches; the first one is kept in the list."""
    batches = evaluation_batches(job.val_loader, job.micro_batch, job.world.rank, job.world.size)
    for number, batch in enumerate(batches):
        if number == 0:
            first.append(batch)
        yield batch


def _save(job: Job) -> float:
    """Write a checkpoint, keep the last ones and the best; returns the seconds that it took."""
    before = time.perf_counter()
    state = job.state
    state.notes["seconds"] = job.seconds
    tensors, record = gather(state, job.world.sum(state.sums.clone()))
    if job.world.main:
        path = step_path(job.run.checkpoints, state.step)
        write_checkpoint(path, tensors, record)
        if job.improved:
            mark_best(path)
        prune(job.run.checkpoints, job.config.checkpoint.keep, state.step)
    job.run.note_skipped(job.world.rank, job.skipped())
    job.improved = False
    job.world.wait()
    return time.perf_counter() - before


def _preempted(job: Job, stop: StopRequest, seconds: float, reporter: Reporter) -> int:
    if job.world.main:
        job.run.set_status("preempted", job.state.step, **job.standing, signal=stop.signal)
    reporter.say(
        f"Stopped after step {job.state.step} ({stop.signal or 'asked for in another process'}); "
        f"saving took {elapsed(seconds)} (torchrun waits 30 s after a signal). "
        f"The same command goes on from here."
    )
    return PREEMPTED
