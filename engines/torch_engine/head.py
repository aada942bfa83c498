"""Log-probabilities of targets from hidden states and the gradient back to them, in chunks of rows.

One call is one datum. The matrix of tokens x vocabulary is never held whole: the buffer of a chunk's logits becomes its
log-probabilities and then the gradient of its logits, in place. No autograd graph is built. The head's own adapter
applies, as do the scalings that some architectures put on their logits. Not responsible for losses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from engines.lora import AdapterWeights, LoraLinear, Pairs
from schemas.errors import Unavailable

_CHUNK_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 27}
"""Logits held at a time (float32: 64 MiB on the CPU, 512 MiB on a GPU); at least one row. With base weights in another
dtype a buffer of that dtype and of as many elements is held too."""

_STRIP_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 24}
"""Elements of the temporary copies inside a chunk; at least one row."""

_ALIGNMENT = 64
"""Bytes. BLAS may choose another kernel, hence other last bits, for operands that are aligned otherwise."""


class Upstream(Protocol):
    """The derivative of a datum's loss by its logprobs."""

    @property
    def elementwise(self) -> bool:
        """True: an element depends on its own logprob only, and may be asked for some rows at a time.

        False: it is asked once, for all rows of the datum.
        """

    def __call__(self, lp: Tensor, rows: slice) -> Tensor:
        """d loss / d lp (float32, `lp`'s shape, finite or not) at these rows of the datum.

        `lp` is float32 [rows] or [rows, K], must not be changed, and comes with autograd switched off.
        """


class _Scratch:
    """Flat buffers by dtype that grow to the largest chunk so far and are used by every call."""

    def __init__(self) -> None:
        self._flat: dict[torch.dtype, Tensor] = {}

    def matrix(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Contiguous [rows, columns] of arbitrary content; valid until the next call for this dtype."""
        rows, columns = shape
        flat = self._flat.get(dtype)
        if flat is None or flat.numel() < rows * columns or flat.device != device:
            self._flat.pop(dtype, None)  # before the larger one comes, so that they are never there together
            flat = self._flat[dtype] = torch.empty(rows * columns, dtype=dtype, device=device)
        return flat[: rows * columns].view(rows, columns)


@dataclass(slots=True)
class _Chunk:
    """Some rows on their way through the head."""

    hidden: Tensor
    """Float32 [n, H]."""
    targets: Tensor
    """Int64 [n, K]."""
    logp: Tensor
    """The scratch buffer [n, vocab]: the whole log-distribution of each row."""
    normaliser: Tensor | None
    """Log of the sum of the exponentials, [n, 1]; only where a soft cap needs it."""


@dataclass(frozen=True, slots=True)
class OutputHead:
    """The head of a causal language model. `scale` and `softcap` are the architecture's (1 and None for most)."""

    linear: nn.Module
    vocab_size: int
    scale: float = 1.0
    softcap: float | None = None
    chunk_rows: int | None = None
    """The most rows of a chunk; None = by a budget of memory for the device."""
    _scratch: _Scratch = field(default_factory=_Scratch, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, model: Any) -> OutputHead:
        """The head of a Hugging Face model, with the logit scalings that its configuration names."""
        linear = model.get_output_embeddings()
        if linear is None:
            raise Unavailable("the base model has no output head; a causal language model is needed")
        if not isinstance(linear, nn.Linear | LoraLinear):
            raise Unavailable(f"the base model's output head is a {type(linear).__name__}; a linear layer is needed")
        config = model.config.get_text_config()
        scale = 1.0
        for key, inverse in (("logit_scale", False), ("lm_head_multiplier", False), ("logits_scaling", True)):
            value = getattr(config, key, None)
            if value is not None:
                scale *= 1.0 / float(value) if inverse else float(value)
        return cls(linear, int(linear.weight.shape[0]), scale, getattr(config, "final_logit_softcapping", None))

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [rows, vocab] of hidden states [rows, H], under the router's choice of adapters."""
        logits = cast(Tensor, self.linear(hidden)).float()
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    @torch.no_grad()
    def logprobs(self, hidden: Tensor, targets: Tensor, adapter: AdapterWeights | None) -> Tensor:
        """Logprobs of one datum's targets: log softmax at temperature 1 over the whole vocabulary, in float32.

        Args:
            hidden: float32 [N, H], after the model's last norm.
            targets: int64 [N] or [N, K], ids within the vocabulary.
            adapter: applies if it covers the head; None = the base model's head. The router has no say here.

        Returns:
            Float32 of the shape of `targets`; the same bits as those of `logprobs_and_gradient`.
        """
        columns = _columns(targets)
        lp = torch.empty(columns.shape, dtype=torch.float32, device=hidden.device)
        for rows in self._rows(hidden.shape[0], hidden.device):
            lp[rows] = self._logprobs(hidden[rows], columns[rows], adapter)[0]
        return lp.view(targets.shape)

    @torch.no_grad()
    def logprobs_and_gradient(
        self,
        hidden: Tensor,
        targets: Tensor,
        adapter: AdapterWeights | None,
        gradient: Pairs | None,
        upstream: Upstream,
    ) -> tuple[Tensor, Tensor]:
        """Logprobs of one datum's targets, and the gradient of its loss.

        Rows whose upstream derivatives are all zero cost nothing in the backward pass. A row with one that is not
        finite gets a gradient that is not finite.

        Args:
            hidden, targets, adapter: as in `logprobs`.
            gradient: where the gradient of the adapter's pair on the head is added; None, or without that module:
                it is not computed.
            upstream: the loss's derivative by the logprobs.

        Returns:
            Logprobs (float32, shape of `targets`) and d loss / d hidden (float32 [N, H]).
        """
        columns = _columns(targets)
        count = hidden.shape[0]
        lp = torch.empty(columns.shape, dtype=torch.float32, device=hidden.device)
        result = lp.view(targets.shape)
        back = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        borders = list(self._rows(count, hidden.device))
        at_once = upstream.elementwise or len(borders) == 1
        for rows in borders:
            lp[rows], chunk = self._logprobs(hidden[rows], columns[rows], adapter)
            if at_once:
                self._backward(chunk, _columns(upstream(result[rows], rows)), adapter, gradient, back[rows])
        if at_once:
            return result, back
        derivative = _columns(upstream(result, slice(0, count)))
        active = _active(derivative)
        for rows in self._rows(active.shape[0], hidden.device):
            index = active[rows]
            chunk = self._logprobs(hidden.index_select(0, index), columns.index_select(0, index), adapter)[1]
            part = torch.empty(chunk.hidden.shape, dtype=torch.float32, device=hidden.device)
            self._backward(chunk, derivative.index_select(0, index), adapter, gradient, part)
            back.index_copy_(0, index, part)
        return result, back

    def _rows(self, count: int, device: torch.device) -> Iterator[slice]:
        """Chunks of equal size (the last may be smaller); they depend on the number of rows alone."""
        most = self.chunk_rows or self._fitting(_CHUNK_ELEMENTS, device)
        size = -(-count // max(1, -(-count // most)))
        for start in range(0, count, max(1, size)):
            yield slice(start, min(start + size, count))

    def _fitting(self, budgets: dict[str, int], device: torch.device) -> int:
        return max(1, budgets.get(device.type, budgets["cpu"]) // self.vocab_size)

    def _pair(self, pairs: Pairs | None) -> tuple[Tensor, Tensor] | None:
        return pairs.get(self.linear.name) if pairs is not None and isinstance(self.linear, LoraLinear) else None

    def _logprobs(self, hidden: Tensor, targets: Tensor, adapter: AdapterWeights | None) -> tuple[Tensor, _Chunk]:
        """Logprobs of the targets [n, K], and the chunk for `_backward`, which must come before the next chunk."""
        hidden = hidden.float().contiguous()
        if hidden.data_ptr() % _ALIGNMENT:
            hidden = hidden.clone()
        logits = self._scratch.matrix((hidden.shape[0], self.vocab_size), torch.float32, hidden.device)
        self._base(hidden, logits)
        pair = None if adapter is None else self._pair(adapter.pairs)
        if pair is not None and adapter is not None:
            logits.addmm_(hidden @ pair[0].t(), pair[1].t(), alpha=adapter.scaling)
        if self.scale != 1.0:
            logits.mul_(self.scale)
        first = None
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
            first = logits[:, :1].clone()
        torch.log_softmax(logits, -1, out=logits)
        normaliser = None if first is None else first - logits[:, :1]
        return logits.gather(1, targets), _Chunk(hidden, targets, logits, normaliser)

    def _base(self, hidden: Tensor, logits: Tensor) -> None:
        """`hidden` through the frozen head, into `logits`."""
        weight, bias = cast(Tensor, self.linear.weight), cast("Tensor | None", self.linear.bias)
        if weight.dtype == torch.float32:
            torch.mm(hidden, weight.t(), out=logits)
        else:
            half = self._scratch.matrix((logits.shape[0], self.vocab_size), weight.dtype, logits.device)
            logits.copy_(torch.mm(hidden.to(weight.dtype), weight.t(), out=half))
        if bias is not None:
            logits.add_(bias)

    def _backward(
        self, chunk: _Chunk, derivative: Tensor, adapter: AdapterWeights | None, gradient: Pairs | None, back: Tensor
    ) -> None:
        """From d loss / d lp [n, K] to d loss / d hidden, written to `back` [n, H]; `chunk.logp` is used up."""
        active = _active(derivative)
        if active.shape[0] == 0:
            back.zero_()
            return
        index = None if active.shape[0] == derivative.shape[0] else active
        hidden = chunk.hidden
        if index is not None:
            derivative, hidden = derivative.index_select(0, index), hidden.index_select(0, index)
        matrix, factor = self._logit_gradient(chunk, derivative, index)
        weight = cast(Tensor, self.linear.weight)
        if weight.dtype == torch.float32:
            result = matrix @ weight
        else:
            half = self._scratch.matrix((matrix.shape[0], self.vocab_size), weight.dtype, matrix.device)
            result = (half.copy_(matrix) @ weight).float()
        result.mul_(factor)
        pair = None if adapter is None else self._pair(adapter.pairs)
        if pair is not None and adapter is not None:
            factor = factor * adapter.scaling
            inner = (matrix @ pair[1]).mul_(factor)
            result.addmm_(inner, pair[0])
            into = self._pair(gradient)
            if into is not None:
                into[0].addmm_(inner.t(), hidden)
                into[1].addmm_(matrix.t(), (hidden @ pair[0].t()).mul_(factor))
        if index is None:
            back.copy_(result)
        else:
            back.zero_().index_copy_(0, index, result)

    def _logit_gradient(self, chunk: _Chunk, derivative: Tensor, index: Tensor | None) -> tuple[Tensor, Tensor]:
        """d loss / d (output of the linear) as `factor * matrix`: matrix [m, vocab] lies in the chunk's buffer.

        `derivative` is that of the m rows that `index` names (ascending; None = all). With one target per row the
        matrix is `softmax - onehot` and the derivative d stays in the factor [m, 1], where it costs no pass over the
        vocabulary; else the matrix is `(sum of d) softmax - sum of d onehot`.
        """
        single = derivative.shape[1] == 1
        matrix = chunk.logp[: derivative.shape[0]]
        size = self._fitting(_STRIP_ELEMENTS, matrix.device)
        for start in range(0, matrix.shape[0], size):
            rows = slice(start, start + size)
            part, own = matrix[rows], rows if index is None else index[rows]
            if index is not None:
                # A row never moves down, so no row is overwritten before its turn.
                part.copy_(chunk.logp.index_select(0, index[rows]))
            slope = None
            if self.softcap is not None and chunk.normaliser is not None:
                slope = (part + chunk.normaliser[own]).div_(self.softcap).square_().neg_().add_(1.0)
            torch.softmax(part, -1, out=part)
            targets = chunk.targets[own]
            if single:
                part.scatter_add_(1, targets, part.new_full(targets.shape, -1.0))
            else:
                part.mul_(derivative[rows].sum(1, keepdim=True)).scatter_add_(1, targets, -derivative[rows])
            if slope is not None:
                part.mul_(slope)
        # Both forms are the negative of the gradient.
        factor = derivative if single else derivative.new_ones(derivative.shape[0], 1)
        return matrix, factor * -self.scale


def _columns(values: Tensor) -> Tensor:
    """[N] or [N, K] as [N, K]."""
    return values if values.dim() == 2 else values.unsqueeze(1)


def _active(derivative: Tensor) -> Tensor:
    """The rows [m], ascending, of a derivative [N, K] that are not zero (not finite counts as not zero)."""
    return (derivative != 0).any(1).nonzero().squeeze(1)
