"""How the devices of one replica share a model, and the names of these layouts on the command line."""

import dataclasses
import re

from jaxflow.bench.pipeline.expert_sharing import HOST_DEVICES
from jaxflow.config import ConfigError

SIZES_TP, SIZES_PP, SIZES_DP = (1, 2, 4, 8), (1, 2, 4, 8), (2, 4, 8, 16, 32, 64)


@dataclasses.dataclass(frozen=True)
class DeviceSplit:
    """The devices of one replica.

    Attributes:
      tp: devices that share each layer. pp: stages.
      dp: devices with tokens of their own, which share the experts of each layer.
      whole_experts: whether a TP device holds whole experts in place of columns of all experts.
      overlapped: whether all-to-alls run beside the other ops of a second nano-batch.

    Raises:
      ConfigError: for sizes that do not go together.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    whole_experts: bool = False
    overlapped: bool = False

    def __post_init__(self) -> None:
        sizes = 1 <= self.tp <= HOST_DEVICES and self.pp >= 1 and self.dp >= 1
        forms = (self.dp == 1 or self.tp == 1) and (self.tp > 1 or not self.whole_experts)
        if not (sizes and forms and (self.dp > 1 or not self.overlapped)):
            raise ConfigError(
                "layouts",
                self.name,
                f"TPxPP with TP from 1 to {HOST_DEVICES} and PP from 1, TPxPP+ep with TP from 2, "
                "dpN with N from 1, or dpN+overlap with N from 2",
            )

    @property
    def devices(self) -> int:
        """Return the number of devices of the replica."""
        return self.tp * self.pp * self.dp

    @property
    def expert_devices(self) -> int:
        """Return the devices that share the experts of a layer as whole experts."""
        return max(self.dp, self.tp if self.whole_experts else 1)

    @property
    def name(self) -> str:
        """Return the layout as the command line names it."""
        if self.dp > 1:
            return f"dp{self.dp}" + (f"x{self.pp}" if self.pp > 1 else "") + "+overlap" * self.overlapped
        return f"{self.tp}x{self.pp}" + "+ep" * self.whole_experts

    @staticmethod
    def parse(name: str) -> "DeviceSplit":
        """Return the layout of a name.

        Raises:
          ConfigError: for a name of another form, and as the constructor.
        """
        found = re.fullmatch(r"dp(\d+)(?:x(\d+))?(\+overlap)?|(\d+)x(\d+)(\+ep)?", name)
        if found is None:
            raise ConfigError(
                "layouts", name, "auto, TPxPP as 8x2, TPxPP+ep, dpN, dpNxPP or either with +overlap"
            )
        dp, stages, overlap, tp, pp, whole = found.groups()
        if dp is not None:
            return DeviceSplit(pp=int(stages or 1), dp=int(dp), overlapped=overlap is not None)
        return DeviceSplit(int(tp), int(pp), whole_experts=whole is not None)


def all_splits(mixture: bool) -> list[DeviceSplit]:
    """Return the layouts that `auto` stands for."""
    found = [DeviceSplit(tp, pp) for tp in SIZES_TP for pp in SIZES_PP]
    if mixture:
        found += [DeviceSplit(tp, pp, whole_experts=True) for tp in SIZES_TP if tp > 1 for pp in SIZES_PP]
        found += [
            DeviceSplit(pp=pp, dp=dp, overlapped=overlapped)
            for dp in SIZES_DP
            for pp in (SIZES_PP if dp <= HOST_DEVICES else (1,))
            for overlapped in (False, True)
        ]
    return found
