"""The paper's experiments as a list of this laboratory's own commands, worked off within a budget of time.

Each item is tuned, where it says so, and run over its seeds; what it finds becomes a record at once. An item whose
record is there already is not done again, so that the work can be spread over many sittings.
"""

import dataclasses
import fnmatch
import itertools
import pathlib
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from saddlefree.lab import batches, optimisers, race, records, results
from saddlefree.lab.errors import UserError, nearest
from saddlefree.lab.metrics import read_json, write_text
from saddlefree.lab.paper import TUNED

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Item:
    """One optimiser on one problem."""

    part: str  # the problem
    optimiser: str
    seeds: int
    label: str = ""  # of its row; the optimiser's name unless given
    epochs: float | None = None
    budget: int | None = None  # seconds of training, in place of epochs
    configs: int = 0  # that are searched; without any, hyperparameters are the registered ones
    search: str | None = None  # how long a search may take; the problem's own time unless given
    changes: tuple[tuple[str, Any], ...] = ()  # to these, and not searched
    evaluations: int | None = None
    group: str = ""  # of its record; the problem unless given
    variant: tuple[tuple[str, Any], ...] = ()  # settings of the problem
    apart: bool = False  # seeds one after another, for the time of a step

    @property
    def name(self) -> str:
        """The row's name."""
        return self.label or self.optimiser

    def plan(self) -> dict[str, Any]:
        """All that its results depend on."""
        kept = ("seeds", "epochs", "budget", "configs")
        plan = {name: getattr(self, name) for name in kept} | {"changes": dict(self.changes)}
        plan |= {"variant": dict(self.variant)} if self.variant else {}
        return plan | ({"apart": True} if self.apart else {})


@dataclasses.dataclass(frozen=True)
class Study:
    """One of the studies, in a size that fits."""

    name: str
    options: tuple[str, ...] = ()
    part: str = "studies"

    def plan(self) -> dict[str, Any]:
        """All that its results depend on."""
        return {"options": list(self.options)}


COSINE = (("decay", "cosine"),)
BATCHES = (("batch_size", 100),)
_ADAM = TUNED["uci-energy", "adam"]
LIKE_ADAM = (
    ("learning_rate", _ADAM["learning_rate"]),
    ("averaging", round(1 - _ADAM["one_minus_beta1"], 12)),
    ("second_moment", round(1 - _ADAM["one_minus_beta2"], 12)),
    ("epsilon", _ADAM["epsilon"]),
    ("newton_rate", 0.1),
    ("damping", 0.1),
    ("refresh_every", 100),
)
"""What the paper found for Adam on UCI Energy; rate and damping of the subspace are the better of two pairs."""


FROM_ADAM = (
    ("digits", "1e-3"),
    ("digits", "1e-2"),
    ("diabetes", "1e-3"),
    ("kin8nm", "3e-3"),
    ("uci-protein", "1e-3"),
    ("fashion-mnist", "1e-3"),
)
"""Problems, and ordinary rates of Adam's on them."""


def _from_adam() -> list[Item | Study]:
    """Adam at an ordinary rate, not tuned, and `low-rank` over this Adam with its own defaults, in two precisions."""
    pairs: list[Item | Study] = []
    for (problem, rate), narrow in itertools.product(FROM_ADAM, (False, True)):
        adam = (("learning_rate", float(rate)), ("decay", "none"), ("epsilon", 1e-8))
        over = (("newton_rate", 0.3), ("damping", 0.01), ("refresh_every", 100), ("second_moment", 0.999))
        averages = (("one_minus_beta1", 0.1), ("one_minus_beta2", 0.001))
        for name, changes in (("adam", (*adam, *averages)), ("low-rank", (*adam, *over))):
            label = f"{problem}-{rate}{'-bfloat16' if narrow else ''}-{name}"
            variant = (("dtype", "bfloat16"),) if narrow else ()
            pairs.append(Item(problem, name, 5, label, changes=changes, group="from-adam", variant=variant))
    return pairs


def _batches() -> list[Item | Study]:
    """The race on mini-batches, and the paper's optimisers on two of its tasks."""

    def cell(
        name: str, label: str, optimiser: str, own: Mapping[str, Any], seeds: int, epochs: float | None = None
    ) -> Item:
        track = batches.TRACKS[name]
        return Item(
            track.problem,
            optimiser,
            seeds,
            f"{name}-{label}",
            epochs=epochs or track.epochs,
            changes=tuple(batches.changes(track, own).items()),
            evaluations=10,
            group=batches.GROUP,
            variant=tuple(track.variant.items()),
            apart=True,
        )

    return [
        *(
            cell(name, method, optimiser, own, batches.SEEDS)
            for name in batches.TRACKS
            for method, (optimiser, own) in batches.methods(name).items()
        ),
        *(
            cell(name, f"paper-{optimiser}", optimiser, {}, seeds, batches.PAPERS_EPOCHS)
            for name in batches.BESIDE_THE_PAPER
            for optimiser, seeds in batches.PAPERS.items()
        ),
    ]


def _pinns() -> list[Item | Study]:
    names = ("lanczos-adaptive", "lbfgs", "adam", "low-rank", "kfac", "series-adaptive")
    return [
        Item(f"pinn-{equation}", name, 3, budget=40)
        for equation in ("poisson", "convection", "burgers")
        for name in names
    ]


def _fashion() -> list[Item | Study]:
    """The paper's hyperparameters where it has them and they do not diverge; the others are searched."""
    common: dict[str, Any] = {"seeds": 5, "evaluations": 20}
    names = ("adam", "sgd", "kfac", "kfac-fixed", "lanczos-adaptive", "lbfgs")
    return [
        Item("fashion-mnist", "low-rank", configs=20, **common),
        Item("fashion-mnist", "adam", label="adam-cosine", configs=20, changes=COSINE, **common),
        *(Item("fashion-mnist", name, **common) for name in names),
        *(Item("fashion-mnist", name, configs=20, search="1h", **common) for name in ("series", "series-adaptive")),
    ]


def _images() -> list[Item | Study]:
    """A few steps of the same batches for all; the number of terms is the paper's, Adam's rate is for small batches."""
    batch = (("batch_size", 64),)
    rate = (("learning_rate", 3e-4),)
    small = {
        "sgd": batch,
        "adam": (*batch, *rate),
        "low-rank": (*batch, *rate, ("damping", 1.0), ("rank", 5), ("refresh_every", 5)),
        "lanczos": (*batch, ("products", 3)),
        "series": batch,
        "kfac": batch,
    }
    return [
        Item(problem, name, 1, epochs=0.08, changes=changes, evaluations=2)
        for problem in ("svhn", "cifar-10")
        for name, changes in small.items()
    ]


ITEMS: list[Item | Study] = [
    Study("saddle"),
    Study("accelerators"),
    Study("spectrum"),
    Item("uci-energy", "low-rank", 50, configs=20),
    Item("uci-energy", "adam", 50, configs=20),
    Item("uci-energy", "adam", 50, "adam-cosine", configs=20, changes=COSINE),
    Item("uci-energy", "low-rank", 50, "low-rank-batches", epochs=1200, changes=(*BATCHES, *LIKE_ADAM)),
    Item("uci-energy", "adam", 50, "adam-batches", epochs=1200, configs=20, changes=(*BATCHES, *COSINE)),
    Item("uci-energy", "sgd", 50, configs=20),
    Item("uci-energy", "lanczos-adaptive", 10, configs=20),
    Item("uci-energy", "kfac", 10, configs=20),
    Item("uci-energy", "kfac-fixed", 10, configs=20),
    Item("uci-energy", "lbfgs", 10, epochs=200, configs=20),
    Item("uci-energy", "series-adaptive", 10),
    Item("uci-energy", "series", 10, configs=20),
    *_fashion(),
    *_from_adam(),
    *_pinns(),
    *_images(),
    Item("uci-energy", "exact-adaptive", 1),
    Item("uci-energy", "exact", 1),
    Item("uci-energy", "newton", 3, epochs=50),
    Study("truncation", ("--steps", "300")),
]
"""In the order in which they are done."""
MINI_BATCHES = _batches()
"""Done where they are asked for."""


def full_name(item: Item | Study | race.Cell) -> str:
    """Its part and its name there."""
    return f"{item.part}:{item.name}"


def record_name(item: Item | Study | race.Cell) -> str:
    """The name of its record."""
    return f"{(isinstance(item, Item) and item.group) or item.part}/{item.name}"


def reproduce(
    work: pathlib.Path,
    out: pathlib.Path,
    docs: pathlib.Path,
    *,
    budget: float,
    only: Sequence[str] = (),
    shard: tuple[int, int] = (1, 1),
    data_dir: str | None = None,
    say: Say = print,
) -> list[str]:
    """Does what has no results yet, as long as there is time, and returns the names of what is left.

    The races are done where they are asked for: `only=["race"]`, or `only=["*:digits-adam*"]`.

    Args:
      work: for the folders of searches, runs and studies.
      out: for the records.
      docs: the documentation, whose figures and numbers follow the records.
      budget: seconds; an item that has begun is done to its end.
      only: parts, or items such as `uci-energy:sgd` or `race:heat-*-0`; all but the race where it is empty.
      shard: (k, n) does the k-th of n parts, so that n processes share the work.
      data_dir: where data sets are looked for first.
      say: is told of each command.
    """
    known = [*ITEMS, *MINI_BATCHES, *race.CELLS, *race.ACCURACIES]
    for name in only:
        if not any(_matches(item, name) for item in known):
            parts = list(dict.fromkeys(item.part for item in known))
            hint = nearest(name, [*parts, *map(full_name, known)], f"there are {', '.join(parts)}")
            raise UserError(f"{name!r} is not known: {hint}")
    wanted = [item for item in known if any(_matches(item, name) for name in only)] if only else ITEMS
    begin = time.monotonic()
    for item in wanted[shard[0] - 1 :: shard[1]]:
        if time.monotonic() - begin > budget or _done(out, item):
            continue
        try:
            _perform(item, work, out, docs, [] if data_dir is None else ["--data-dir", data_dir], say)
            if not isinstance(item, race.Cell):
                refresh(out, docs)
        except UserError as error:
            say(str(error))
    racing = [item for item in wanted if isinstance(item, race.Cell)]
    if racing:
        race.draw(out, docs)
    refresh(out, docs)
    return [full_name(item) for item in racing if not _done(out, item)] if racing else left_out(out)


def _matches(item: Item | Study | race.Cell, name: str) -> bool:
    """Whether a name is the item's part, its own, or a pattern of its own such as `race:heat-*`."""
    return item.part == name or fnmatch.fnmatchcase(full_name(item), name)


def refresh(out: pathlib.Path, docs: pathlib.Path) -> list[pathlib.Path]:
    """Renders again what README.md and the documentation quote of the records; returns the pages that changed."""
    blocks = results.blocks(out) | {"left-out": lambda: _listed(left_out(out))}
    changed = []
    if not (docs / "results.md").exists():
        docs.mkdir(parents=True, exist_ok=True)
        shown = ("performance", "results", "studies", "left-out")
        empty = "\n".join(f"<!-- begin {name} -->\n<!-- end -->\n" for name in shown)
        write_text(docs / "results.md", f"# Results\n\n{empty}")
    for path in [docs.parent / "README.md", *sorted(docs.glob("*.md"))]:
        if path.exists():
            before = path.read_text("utf-8")
            try:
                after = records.refresh(before, out, blocks)
            except UserError as error:
                raise UserError(f"{path}: {error}") from None
            if after != before:
                write_text(path, after)
                changed.append(path)
    return changed


def _listed(names: Sequence[str]) -> str:
    return "".join(f"- {name}\n" for name in names) or "Nothing that was planned.\n"


def left_out(out: pathlib.Path) -> list[str]:
    """What has no record yet, or one of an earlier version's algorithm."""
    return [full_name(item) for item in ITEMS if not _done(out, item)]


def _done(out: pathlib.Path, item: Item | Study | race.Cell) -> bool:
    return results.holds(out, record_name(item), item.plan())


def _perform(
    item: Item | Study | race.Cell, work: pathlib.Path, out: pathlib.Path, docs: pathlib.Path, data: list[str], say: Say
) -> None:
    if isinstance(item, Study):
        folder = work / f"study-{item.name}"
        _command(["study", item.name, *item.options, "--out", str(folder), "--resume", *data], say)
        results.add_study(out, docs, item.name, folder, item.plan())
        return
    if isinstance(item, race.Cell):
        folder = work / item.part / item.name
        _command([*item.command(folder), *data], say)
        race.add(out, item, folder)
        shutil.rmtree(folder)  # a record that is deleted is run anew
        return
    searched, data = None, [*data, *_pairs("--variant", dict(item.variant))]
    values = dict(item.changes)
    if item.configs:
        searched = work / "tune" / item.part / item.name
        command = ["tune", item.part, item.optimiser, "--configs", str(item.configs), *_pairs("--set", values)]
        command += [] if item.epochs is None else ["--max-epochs", str(item.epochs)]
        command += [] if item.search is None else ["--budget", item.search]
        if not (searched / "summary.json").exists():  # otherwise its budget is spent
            _command([*command, "--out", str(searched), "--resume", *data], say)
        best = read_json(searched / "summary.json")["best"]
        if best is None:
            raise UserError(f"{searched}: no trial ended with a finite loss")
        known = optimisers.configured(item.optimiser, item.part, {})
        values = {name: value for name, value in best["values"].items() if value != known.get(name)}
    folder = work / item.part / item.name
    command = ["compare", item.part, "--optimisers", item.optimiser, "--seeds", str(item.seeds)]
    for name in ("epochs", "budget", "evaluations"):
        if getattr(item, name) is not None:
            command += [f"--{name}", str(getattr(item, name))]
    command += _pairs("--set", {f"{item.optimiser}.{name}": value for name, value in values.items()})
    command += ["--apart"] if item.apart else []
    _command([*command, "--out", str(folder), "--resume", *data], say)
    results.add(out, record_name(item), folder, item.plan(), searched)
    if not item.group:
        results.draw(out, docs, item.part)


def _pairs(option: str, values: Mapping[str, Any]) -> list[str]:
    return [text for name, value in values.items() for text in (option, f"{name}={value}")]


def _command(arguments: list[str], say: Say) -> None:
    """Runs a command of this laboratory in a process of its own, whose memory is free afterwards."""
    say(f"saddlefree {shlex.join(arguments)}")
    code = subprocess.run([sys.executable, "-m", "saddlefree.lab.cli", *arguments], check=False).returncode
    if code in (130, 143, -2, -15):
        raise KeyboardInterrupt
    if code not in (0, 3):  # 3: it diverged, which is a result too
        raise UserError(f"`saddlefree {arguments[0]} {arguments[1]}` ended with {code}; this item is left out")


if __name__ == "__main__":  # the pages alone
    for changed in refresh(pathlib.Path("results"), pathlib.Path("docs")):
        print(changed)
