"""What a transformer is: sizes from a TOML file or a preset."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pipesim.errors import ScheduleError, require_count
from pipesim.files import read_limited
from pipesim.presets import file_or_preset, preset_names

__all__ = ["ModelSpec", "model_presets", "read_model", "read_preset"]


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The sizes of a decoder (or, with ``causal=False``, an encoder) of identical layers.

    Attributes:
        name: For summaries.
        layers: L, transformer layers.
        hidden: h, width of the residual stream.
        heads: a, query heads.
        vocabulary: V, as padded for training.
        sequence: s, tokens of a sample.
        kv_heads: Key and value heads; fewer than *heads* with grouped queries. None for as many as *heads*.
        head_dim: Width of a head; None for hidden / heads.
        ffn: Width of the feed-forward layer (of one expert); None for 4h.
        gated: Whether the feed-forward layer has a gate (SwiGLU): three matrices instead of two.
        tied_embeddings: Whether the output layer uses the input embedding's weights.
        learned_positions: Whether positions are learned (s x h parameters); otherwise rotary.
        biases: Whether linear layers have biases.
        norm: ``"layernorm"`` (weight and bias) or ``"rmsnorm"`` (weight).
        dropout: Whether it trains with dropout, whose masks are kept.
        causal: Whether a token attends to earlier ones only.
        experts: Feed-forward networks per layer; 1 is a dense model.
        active_experts: How many of them a token goes through.
        source: Where the sizes are from.

    Examples:
        >>> model = ModelSpec(name="tiny", layers=2, hidden=8, heads=2, vocabulary=16, sequence=4)
        >>> model.ffn_width, model.head_width, model.kv_width
        (32, 4, 8)
    """

    name: str
    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int
    kv_heads: int | None = None
    head_dim: int | None = None
    ffn: int | None = None
    gated: bool = False
    tied_embeddings: bool = True
    learned_positions: bool = True
    biases: bool = True
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    dropout: bool = True
    causal: bool = True
    experts: int = 1
    active_experts: int = 1
    source: str = ""

    def __post_init__(self) -> None:
        for field in ("layers", "hidden", "heads", "vocabulary", "sequence", "experts", "active_experts"):
            require_count(field, getattr(self, field))
        for field in ("kv_heads", "head_dim", "ffn"):
            if getattr(self, field) is not None:
                require_count(field, getattr(self, field))
        if self.head_dim is None and self.hidden % self.heads:
            raise ScheduleError(f"{self.name}: hidden = {self.hidden} is no multiple of heads = {self.heads}; give head_dim")
        if self.heads % self.groups:
            raise ScheduleError(f"{self.name}: heads = {self.heads} is no multiple of kv_heads = {self.groups}")
        if self.active_experts > self.experts:
            raise ScheduleError(f"{self.name}: {self.active_experts} active experts of {self.experts}; a token cannot go through more than there are")
        if self.norm not in ("layernorm", "rmsnorm"):
            raise ScheduleError(f"{self.name}: norm must be 'layernorm' or 'rmsnorm', got {self.norm!r}")

    @property
    def groups(self) -> int:
        """Key and value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_width(self) -> int:
        """Width of a head."""
        return self.hidden // self.heads if self.head_dim is None else self.head_dim

    @property
    def query_width(self) -> int:
        """Width of all query heads together; h unless *head_dim* says otherwise."""
        return self.heads * self.head_width

    @property
    def kv_width(self) -> int:
        """Width of all keys, and of all values."""
        return self.groups * self.head_width

    @property
    def ffn_width(self) -> int:
        """Width of the feed-forward layer."""
        return 4 * self.hidden if self.ffn is None else self.ffn

    def with_sequence(self, sequence: int) -> ModelSpec:
        """Returns the model trained on samples of another length."""
        return replace(self, sequence=require_count("sequence", sequence))


def model_presets() -> list[str]:
    """Names of the models that ship with pipesim.

    Examples:
        >>> "gpt3-175b" in model_presets()
        True
    """
    return preset_names("model")


def read_model(source: str | Path) -> ModelSpec:
    """Reads a model from a TOML file, or a preset by its name.

    Args:
        source: A path, or one of :func:`model_presets`.

    Raises:
        ScheduleError: There is no such file or preset, a key is unknown, or the sizes do not fit together.

    Examples:
        >>> read_model("gpt3-175b").hidden
        12288
    """
    from pipesim.userfiles import ModelFile

    data = read_preset(ModelFile, source, "model")
    where = data.pop("where")
    return ModelSpec(**{"name": Path(where).stem.removeprefix("model-"), **data})


def read_preset(form: Any, source: str | Path, kind: str) -> dict[str, Any]:
    """Reads a TOML file, or a preset by its name, as the keys that are given, and ``where`` they are from."""
    from pipesim.userfiles import parse_toml

    path = file_or_preset(source, kind, kind)
    data: dict[str, Any] = parse_toml(form, read_limited(path), str(path)).model_dump(exclude_none=True)
    return {**data, "where": str(path)}
