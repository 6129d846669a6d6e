"""The space of a search in Hydra's own sweep grammar."""

from collections.abc import Mapping, Sequence

from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep

from vision.config import ConfigError, suggest
from vision.sweeps.search_space import Choices, Dimension, Interval, Steps


def read_space(overrides: Sequence[Override]) -> tuple[dict[str, Dimension], dict[str, str]]:
    """The settings with several values and their values, and the words with one; both by setting.

    A later word for the same setting takes the place of an earlier one.
    """
    by_key: Mapping[str, Override] = {o.key_or_group: o for o in overrides}
    space, fixed, mistakes = {}, {}, []
    for key, override in by_key.items():
        if not override.is_sweep_override():
            fixed[key] = str(override.input_line)
            continue
        try:
            space[override.get_key_element()] = _dimension(override)
        except ConfigError as error:
            mistakes.append(str(error))
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return space, fixed


def _dimension(override: Override) -> Dimension:
    word, sweep = override.input_line, override.value()
    tags = set(getattr(sweep, "tags", ()))
    known = {"log", "int"} if isinstance(sweep, IntervalSweep) else set[str]()
    for tag in sorted(tags - known):
        if not known:
            raise ConfigError(f"{word}: the tag '{tag}' is for interval(…) only.")
        raise ConfigError(f"{word}: unknown tag '{tag}'. {suggest(tag, known)}")
    if isinstance(sweep, IntervalSweep):
        low, high = sweep.start, sweep.end
        integer = "int" in tags or (isinstance(low, int) and isinstance(high, int))
        if low is None or high is None or not low < high:
            raise ConfigError(f"{word}: the first end has to be smaller than the second.")
        if integer and (low != int(low) or high != int(high)):
            raise ConfigError(f"{word}: the ends of integers have to be integers.")
        if "log" in tags and low <= 0:
            raise ConfigError(f"{word}: a logarithmic interval starts above 0.")
        return Interval(low, high, log="log" in tags, integer=integer)
    if isinstance(sweep, RangeSweep | ChoiceSweep):
        sweep.shuffle = False  # the same space after a restart; a search has no order to shuffle
    if isinstance(sweep, RangeSweep):
        values = tuple(sorted(set(sweep.range())))
        if values:
            return Steps(values)
    texts = tuple(dict.fromkeys(override.sweep_string_iterator()))
    if not texts:
        raise ConfigError(f"{word}: there is nothing that this stands for.")
    return Choices(texts)
