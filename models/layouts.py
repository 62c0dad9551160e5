"""Every layout there is, found by its name or by the files themselves."""

from models.eagle3_files import SafeEagle3, SglangEagle3, SpeculatorsEagle3, VllmEagle3
from models.eagle_files import SafeEagle, VllmEagle
from models.medusa_files import FasterMedusa, VllmMedusa
from models.peagle_files import SpeculatorsPEagle, VllmPEagle
from models.served import Layout, Served

LAYOUTS: tuple[Layout, ...] = (
    VllmMedusa(),
    FasterMedusa(),
    SpeculatorsEagle3(),
    VllmEagle3(),
    SglangEagle3(),
    SafeEagle3(),
    SpeculatorsPEagle(),
    VllmPEagle(),
    VllmEagle(),
    SafeEagle(),
)


def layout_for(name: str, family: str) -> Layout:
    """The layout called `name` for drafters of `family`."""
    known = {layout.name: layout for layout in LAYOUTS if layout.family == family}
    if name not in known:
        served = ", ".join(sorted({layout.family.rpartition(".")[2] for layout in LAYOUTS}))
        nobody = f"no server known here reads this family: decode with Outrider, or train one that is read ({served})"
        has = f"it has {', '.join(sorted(known))}" if known else nobody
        raise ValueError(f"{family} has no layout {name!r}; {has}")
    return known[name]


def recognised(served: Served, name: str | None = None) -> Layout:
    """The layout that the files are of, among those called `name` or all."""
    if name is not None and name not in {layout.name for layout in LAYOUTS}:
        raise ValueError(f"there is no layout {name!r}; use {', '.join(sorted({one.name for one in LAYOUTS}))}")
    for layout in LAYOUTS:
        if name in (None, layout.name) and layout.claims(served.config, served.tensors):
            return layout
    held = ", ".join(sorted(served.tensors)[:3]) or "nothing"
    raise ValueError(
        f"this is no {name or 'known'} layout of a drafter: it holds {held} ...; name another with layout="
    )
