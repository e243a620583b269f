"""The systems that benches compare: over the same parameters, which attention decodes and where its blocks are."""

from dataclasses import dataclass

from nosa_jax.config import AttentionKind, NosaConfig
from nosa_jax.offload.layout import CacheLayout


@dataclass(frozen=True)
class System:
    """What decodes: which attention, and how many slots hold its blocks (None: every block has one)."""

    name: str
    attention: AttentionKind
    slots_per_selected: float | None

    def layout(self, config: NosaConfig, batch: int, context: int, *, overlap: bool = False) -> CacheLayout:
        """The cache of so many rows of so many tokens; overlap as in `CacheLayout`, of no effect on a resident one."""
        offload = self.slots_per_selected is not None
        selected = config.budget_for(self.attention).total
        slots = round(selected * self.slots_per_selected) if self.slots_per_selected is not None else selected
        n_blocks = config.num_blocks(context)
        slots = min(slots, max(selected, n_blocks))
        return CacheLayout(config, self.attention, batch, context, offload, slots, overlap=overlap and offload)


SYSTEMS = {
    system.name: system
    for system in (
        System("dense", "dense", None),
        System("infllmv2-c", "infllmv2", 1.0),
        System("infllmv2", "infllmv2", 2.0),
        System("infllmv2-resident", "infllmv2", None),
        System("dma-c", "dma", 1.0),
        System("dma", "dma", 2.0),
        System("dma-resident", "dma", None),
        System("nosa-c", "nosa", 1.0),
        System("nosa", "nosa", 2.0),
        System("nosa-resident", "nosa", None),
    )
}
