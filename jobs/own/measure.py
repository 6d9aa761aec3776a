"""What the planner has to know of an own model, measured without memory and without a GPU: parameters, FLOPs, bytes
kept for the backward, what tensor parallelism moves.

`python -m jobs.own.measure < ORDER.json` (jobs.spec.own_model): run by the orchestrator, which never imports the
user's code. Builds the model on the meta device, splits it over a process group that does nothing, and runs one forward
of one sequence on fake tensors for each degree of tp. The user's own prints go to stderr.
"""
import dataclasses
import json
import os
import sys
import traceback
from collections import Counter
from contextlib import redirect_stdout
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from jobs.mesh import local_of
from jobs.own.build import OwnModelError, build, told
from jobs.own.chain import Known, read
from jobs.own.check import table_problem
from jobs.own.dropout import following
from jobs.own.split import Share, apply_styles
from jobs.own.table import Table, sequence_parallel_problem, tp_problem
from jobs.parallel import tie_again
from jobs.parallel.recompute import KEPT
from jobs.pretended import pretended_rank
from jobs.spec.load import from_dict, to_dict
from jobs.spec.own_model import Measured, MeasureAnswer, MeasureOrder, OwnModel, OwnProfile, Piece

ELEMENT_BYTES = 4  # models are built in float32


def measure(spec: OwnModel, *, seq_len: int, degrees: tuple[int, ...]) -> OwnProfile:
    """Raises OwnModelError."""
    known = read(spec, seq_len=seq_len)
    *_, again = build(spec, seq_len=seq_len)
    if known.recipe.digest() != again.digest():
        raise OwnModelError(f"model.entrypoint: {spec.entrypoint!r} makes other weights each time that it is called, "
                            "so ranks would differ; numpy and random are seeded; make and seed inside of it what else "
                            "it draws from (np.random.default_rng, torch.Generator)")
    no_sequence = sequence_parallel_problem(known.model, known.table)
    no_tp = {tp: problem for tp in degrees if (problem := tp_problem(known.model, known.table, tp=tp)) is not None}
    measured = [_measure(spec, seq_len=seq_len, tp=1, sequence_parallel=False)]
    split = sorted(set(degrees) - {1} - no_tp.keys())
    for tp in split[:1]:  # of one degree: what is wrong is wrong at all of them
        what = {"seq_len": seq_len, "tp": tp}
        if problem := table_problem(spec, **what, sequence_parallel=False):
            raise OwnModelError(f"plan table: {problem}")
        if no_sequence is None and seq_len % tp == 0:
            no_sequence = table_problem(spec, **what, sequence_parallel=True)
    for tp in split:
        for sequence_parallel in (False,) if no_sequence or seq_len % tp else (False, True):
            measured.append(_measure(spec, seq_len=seq_len, tp=tp, sequence_parallel=sequence_parallel))
    return OwnProfile(num_params=_numel(known.model), measured=tuple(measured), no_pp=known.chain.broken, no_tp=no_tp,
                      flops_per_token=3 * known.chain.forward_flops / seq_len,
                      splits_logits=known.table.head is not None, no_sequence_parallel=no_sequence)


def _measure(spec: OwnModel, *, seq_len: int, tp: int, sequence_parallel: bool) -> Measured:
    known = read(spec, seq_len=seq_len)
    model, table = known.model, known.table
    with pretended_rank(0, world_size=tp):
        if tp > 1:
            mesh = init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",))
            apply_styles(model, table, share=Share.of(mesh, sequence_parallel=sequence_parallel))
        with following(known.draws, model, [model.get_submodule(path) for path in table.blocks], seq_len=seq_len,
                       size=tp):
            pass
        with FakeTensorMode(allow_non_fake_inputs=True):
            model._apply(_on_cpu)
            tie_again(model, table.ties)
            count = _Count(known, share=tp if sequence_parallel else 1)
            given = {"x": torch.zeros(1, seq_len, dtype=torch.int64)}
            if known.draws is not None:
                given["keys"] = torch.zeros(1, dtype=torch.int64)
            with torch.autograd.graph.saved_tensors_hooks(count.pack, lambda packed: packed), count:
                logits = _forward(model, given, tp=tp, sequence_parallel=sequence_parallel)
    wanted = spec.vocab_size // tp if table.head is not None else spec.vocab_size
    if tuple(logits.shape) != (1, seq_len, wanted):
        raise OwnModelError(f"plan table: at tp={tp} the logits are {list(logits.shape)}, not [1, {seq_len}, {wanted}]"
                            ": something enters a split and does not leave it, or the other way round")
    count.note_summed(model, table)
    before, *blocks, behind = count.pieces
    return Measured(tp=tp, sequence_parallel=sequence_parallel, before=_piece(before), behind=_piece(behind),
                    blocks=tuple(map(_piece, blocks)), hidden=count.hidden, tied=count.tied,
                    drawn=0 if known.draws is None else known.draws.largest)


def _forward(model: nn.Module, given: dict[str, Tensor], *, tp: int, sequence_parallel: bool) -> Tensor:
    tokens, *keys = given.values()
    try:
        return model(tokens, *keys)
    except Exception as error:
        raise OwnModelError(f"plan table: at tp={tp}, sequence_parallel={sequence_parallel} a forward raised "
                            f"{told(error)}") from error


def _on_cpu(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return torch.empty_like(tensor, device="cpu")
    return DTensor.from_local(torch.empty_like(tensor.to_local(), device="cpu"), tensor.device_mesh, tensor.placements,
                              run_check=False)


def _piece(figures: Counter) -> Piece:
    return Piece(**{field.name: figures[field.name] for field in dataclasses.fields(Piece)})


class _Count(TorchDispatchMode):
    """Counts every operation of a forward, piece by piece: before the blocks, each block, behind them."""

    def __init__(self, known: Known, *, share: int) -> None:
        super().__init__()
        model, table = known.model, known.table
        self.share = share  # ranks that share out the tokens between splits
        self.hidden = 0
        at_both_ends = known.tied_ends  # needed again behind the blocks: they belong there
        self._tied = {p for name, p in model.named_parameters() if name in at_both_ends}
        self.tied = sum(local_of(p).numel() for p in self._tied)
        blocks = [model.get_submodule(path) for path in table.blocks]
        inside = sum(_numel(block) for block in blocks)
        first = [module for path, module in model.named_children() if module not in blocks]
        # by Piece's fields
        self.pieces = [Counter(params=n) for n in (0, *map(_numel, blocks), _numel(model) - inside)]
        self.now = self.pieces[0]
        self._held = {local_of(p).untyped_storage()._cdata for p in model.parameters()}
        self._seen: set[int] = set()
        for i, block in enumerate(blocks):
            block.register_forward_pre_hook(self._enter(i + 1), prepend=True)
            block.register_forward_hook(self._leave(i + 1 if i + 1 < len(blocks) else None))
        for module in first:
            module.register_forward_pre_hook(self._owns(module))
        self._watch_splits(model, table)

    def note_summed(self, model: nn.Module, table: Table) -> None:
        """Parameters of which each tp rank has an addend of the gradient; of the ends' it does not matter which end."""
        for path, module in model.named_modules():
            numel = sum(local_of(module._parameters[name]).numel() for name in getattr(module, "partial_gradients", ()))
            index = next((i + 1 for i, block in enumerate(table.blocks) if f"{path}.".startswith(f"{block}.")), -1)
            self.pieces[index].update(summed=numel)

    def _watch_splits(self, model: nn.Module, table: Table) -> None:
        splits = tuple(f"{path}." for path, style in table.styles.items() if style == "split")
        for path, style in table.styles.items():
            module = model.get_submodule(path)
            if style in ("column", "head", "split") and not path.startswith(splits):
                module.register_forward_pre_hook(
                    lambda module, args: self.now.update(entered=args[0].numel() * self.share, entries=1), prepend=True)
            if style in ("row", "vocab"):
                module.register_forward_hook(
                    lambda module, args, out: self.now.update(left=out.numel() * self.share, exits=1))

    def _enter(self, index: int):
        def hook(module: nn.Module, args: tuple) -> None:
            self.now = self.pieces[index]
            self.now.update(kept=args[0].numel())
        return hook

    def _leave(self, following: int | None):
        def hook(module: nn.Module, args: tuple, output: Tensor) -> None:
            self.hidden = output.numel()
            self.now = self.pieces[-1] if following is None else self.pieces[0]
        return hook

    def _owns(self, module: nn.Module):
        """Parameters lie where they are used first."""
        def hook(module_: nn.Module, args: tuple) -> None:
            if self.now is self.pieces[0] and id(module) not in self._seen:
                self._seen.add(id(module))
                numel = sum(local_of(p).numel() for p in module.parameters() if p not in self._tied)
                self.now.update(params=numel)
                self.pieces[-1].update(params=-numel)
        return hook

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._held:
            self._held.add(storage._cdata)
            self.now.update(saved=storage.nbytes() / ELEMENT_BYTES)
        return tensor

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
        made = [t for t in tree_flatten(out)[0] if isinstance(t, Tensor)]
        if func.namespace == "c10d" or func.is_view:
            return out
        self.now.update(kernels=1)
        if (flops := _flops(func, args, kwargs or {}, out)) is not None:
            self.now.update(flops=flops)
        else:
            self.now.update(moved=sum(t.numel() * t.element_size() for t in (*given, *made)) / ELEMENT_BYTES)
        if func in KEPT:
            self.now.update(kept=made[0].numel())
        return out


def _flops(func, args: tuple, kwargs: dict, out: Any) -> float | None:
    """None: not an operation that multiplies matrices."""
    if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
        return sdpa_flop_count(*(t.shape for t in args[:3]))
    counted = flop_registry.get(func.overloadpacket)
    return None if counted is None else counted(*args, **kwargs, out_val=out)


def _numel(module: nn.Module) -> int:
    return sum(local_of(p).numel() for p in module.parameters())


def main() -> None:
    order = from_dict(MeasureOrder, json.load(sys.stdin), origin="order")
    os.chdir(order.workdir)
    sys.path.insert(0, order.workdir)
    with redirect_stdout(sys.stderr):
        try:
            answer = MeasureAnswer(profile=measure(order.model, seq_len=order.seq_len, degrees=order.tp))
        except OwnModelError as refused:
            if refused.__cause__ is not None:
                traceback.print_exception(refused.__cause__)
            answer = MeasureAnswer(problems=tuple(str(refused).splitlines()))
    print(json.dumps(to_dict(answer)))


if __name__ == "__main__":
    main()
