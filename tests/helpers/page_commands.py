"""Commands in the code blocks of Markdown pages."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vision.cli.app import COMMANDS

ROOT = Path(__file__).parents[2]
PROGRAMS = {"python", "vision", "torchrun", "make", "pip", "srun", "sbatch", "bash"}
PLACEHOLDERS = {"recipe=RECIPE": "recipe=finetune", "hydra/launcher=…": "hydra/launcher=local"}
"""Words that stand for one of several."""

NEEDS = {
    "download": r"\b(?:timm|hf):|init=pretrained|download=true|data=huggingface",
    "GPU": r"device=cuda|test-gpu|gpu_report",
    "cluster": r"^(?:torchrun|srun|sbatch)|submitit_slurm|launcher=ray|test-slurm",
}
"""What a command needs that a machine of the tests may not have."""


@dataclass(frozen=True)
class PageCommand:
    """A command as it is written on a page."""

    page: str
    text: str
    refused: bool
    """The page shows that it is an error."""

    @property
    def words(self) -> list[str]:
        """Without comments, an environment, and `…` for more settings of the reader's."""
        words = shlex.split(self.text, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words = words[1:]
        words = [PLACEHOLDERS.get(word, word) for word in words]
        words = [word for word in words if word not in ("…", "data=…")]
        return [Path(words[0]).name, *(word.replace("=…", "=given") for word in words[1:])]

    @property
    def needs(self) -> list[str]:
        """What it needs beyond this project and a CPU."""
        return [what for what, pattern in NEEDS.items() if re.search(pattern, self.text)]

    @property
    def own(self) -> tuple[str, list[str]] | None:
        """Name and settings of a command of this project."""
        words = self.words
        scripts = {"train.py": "train", "eval.py": "eval"}
        for number, word in enumerate(words[:8]):
            if Path(word).name in scripts and words[0] in ("python", "torchrun", "srun"):
                return scripts[Path(word).name], words[number + 1 :]
        if words[0] == "vision" and len(words) > 1 and words[1] in COMMANDS:
            return words[1], words[2:]
        return None


def page_commands(page: Path) -> Iterator[PageCommand]:
    """The commands of a page, in the order of the text."""
    name = page.name
    lines = _code(page.read_text())
    for number, line in enumerate(lines):
        text = line.strip().removeprefix("$ ")
        while text.endswith("\\"):
            text = f"{text[:-1].rstrip()} {lines.pop(number + 1).strip()}"
        program = re.sub(r"^(?:[A-Z_]+=\S* )+", "", text).partition(" ")[0]
        if Path(program).name in PROGRAMS and program != "vision/":
            after = lines[number + 1] if number + 1 < len(lines) else ""
            # a program in a listing of files or in Python is not a command
            if not re.match(r"(?:python|vision)[:.]?\s{2,}|\w+\.py\s", text):
                for part in text.split(" && "):
                    yield PageCommand(name, part, after.startswith("error: "))


def _code(markdown: str) -> list[str]:
    """Lines of shell code: of fenced blocks without another language, and of indented ones."""
    found, fence, before = [], None, ""
    for line in markdown.splitlines():
        if line.lstrip().startswith("```"):
            fence = line.strip()[3:] if fence is None else None
        else:
            indented = line.startswith("    ") and (not before or before.startswith("    "))
            if fence in ("bash", "console", "") or (fence is None and indented):
                found.append(line)
        before = line
    return found
