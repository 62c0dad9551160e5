"""A target without its body: with all features on disk, training needs its embedding and head alone."""

from conf.schema import Target as TargetConf
from decode.opening import identity_of, target_folder
from models.ends import Ends
from models.target import device_of, resolve_dtype


class Bodiless:
    """What training asks of a target that nobody needs to run."""

    def __init__(self, conf: TargetConf):
        folder = target_folder(conf)
        self.device = device_of(conf.device)
        self.dtype = resolve_dtype(conf.dtype, self.device)
        self.ends = Ends.load(folder, self.dtype, str(self.device))
        self.identity = identity_of(conf)
        self.taps: tuple[int, ...] = ()

    def tap(self, taps: tuple[int, ...]) -> None:
        """The hidden states that are to be read from disk."""
        self.taps = taps
