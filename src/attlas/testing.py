"""The contracts that every score, mask and statistic of attlas keeps, for classes of your own.

Each function is silent where all laws hold, and raises a `ContractError`, which is an AssertionError, at the
first that does not: put one call into your tests.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attlas.engine import operations
from attlas.engine.autodiff import graph
from attlas.engine.backends import tiled
from attlas.engine.plan import Plan
from attlas.engine.problem import Problem, tree_flatten, tree_map
from attlas.engine.statistic import Statistic, TensorForm, Workspace
from attlas.engine.tiling import RowBlock, column_blocks
from attlas.errors import ContractError, DtypeError, ShapeError, public
from attlas.foundation.tiles import Tile, cut
from attlas.masks import BlockState, Causal, Mask, from_function
from attlas.matrix import AttentionMatrix
from attlas.matrix.attend import attend
from attlas.scores import Score
from attlas.stats import RowMass

__all__ = ["ContractError", "check_mask", "check_score", "check_statistic"]

_CLOSE_TOLERANCE = 1e-8  # in float64: far above rounding, far below any mistake
# Whole, several blocks of rows and of columns, and next to no memory: the result must not depend on it.
_TESTED_PLANS = (Plan("tiled"), Plan("tiled", rows=3, columns=4), Plan("tiled", cells=16), Plan())
_PLANS_FOR_MASKS = (Plan("tiled"), Plan("tiled", rows=31, columns=47), Plan(rows=64), Plan())


@dataclass(frozen=True)
class _CheckedContract:
    """A check of one object: the function and the object that its errors name.

    Parameters
    ----------
    where : str
        The function, with the class of the object.
    given : mapping of str to object
        The object.
    """

    where: str
    given: Mapping[str, object]

    def broken(self, rule: str, found: str, fix: str) -> ContractError:
        """Return the error of a broken rule."""
        return ContractError(rule, found, fix, arguments=self.given, where=self.where)

    def check_close(
        self, rule: str, results: Sequence[Tensor], expected: Sequence[Tensor], fix: str, found: str = "off by {}"
    ) -> None:
        """Raise the error of a rule unless tensors are equal up to rounding; `found` takes the largest difference."""
        error = max((_largest_difference(a, b) for a, b in zip(results, expected, strict=True)), default=0.0)
        if error > _CLOSE_TOLERANCE:
            raise self.broken(rule, found.format(f"{error:.2g}"), fix)


def check_score(score: Score, query_size: int = 8, key_size: int | None = None, heads: int = 2) -> None:
    """Check that a score keeps the contract of `attlas.Score`.

    Parameters
    ----------
    score : Score
        A score, as it is handed to `attlas.attend`. It is copied to float64 and left as it is.
    query_size : int, default 8
        Size of a query that it takes.
    key_size : int, optional
        Size of a key; the default is `query_size`.
    heads : int, default 2
        Number of heads that it is made for.

    Raises
    ------
    ContractError
        If `forward` gives a wrong shape or dtype, a tile that differs from that part of the whole matrix, or
        writes to its tokens; if `finite`, `positional` or `as_dot` say what is not so; if output or gradients
        depend on the plan, or gradients differ from finite differences.

    See Also
    --------
    check_mask, check_statistic

    Notes
    -----
    Cost: some hundred matrices of 7 × 9, well under a second. Run it at points where the score is
    differentiable: random tokens are.

    Examples
    --------
    >>> import torch, attlas
    >>> class Cauchy(attlas.Score):
    ...     def forward(self, q, k, at):
    ...         return -torch.log1p((q.unsqueeze(-2) - k.unsqueeze(-3)).square().sum(-1))
    >>> attlas.testing.check_score(Cauchy())
    >>> class Centred(attlas.Score):  # a score may not look beyond its tile
    ...     def forward(self, q, k, at):
    ...         return q @ (k - k.mean(-2, keepdim=True)).mT
    >>> attlas.testing.check_score(Centred())
    Traceback (most recent call last):
    attlas.errors.ContractError: check_score(Centred): a tile must equal that part of the whole matrix.
      score: Centred()
      found: rows 0 to 2, columns 0 to 3, off by 2
      fix: let forward() look at q, k and at, pair by pair; what needs all tokens belongs into project().
    """
    if not isinstance(score, Score):
        rule = "score must be an attlas.Score."
        raise ContractError(rule, repr(score), "class MyScore(Score)", where="check_score()")
    contract = _CheckedContract(f"check_score({type(score).__name__})", {"score": repr(score)})
    score = copy.deepcopy(score).double()
    q = _random_numbers(2, heads, 7, query_size).requires_grad_()
    k = _random_numbers(2, heads, 9, query_size if key_size is None else key_size, seed=1).requires_grad_()
    score.check(q, k, heads)
    problem = attend(q, k, score=score).problem
    before = [t.detach().clone() for t in (q, k)]
    _check_tiles_of_score(contract, problem)
    if not all(torch.equal(a, b) for a, b in zip((q, k), before, strict=True)):
        fix = "leave out in-place operations, or work on a copy."
        raise contract.broken("forward() must not write to its tokens.", "q or k has changed", fix)
    _check_attributes_of_score(contract, problem)
    _check_products(contract, lambda plan: attend(q, k, score=score, mask=_sampled_pairs(), plan=plan), score)


def check_mask(mask: Mask, m: int | None = None, n: int | None = None, batch: int = 1, heads: int = 1) -> None:
    """Check that a mask keeps the contract of `attlas.masks.Mask`.

    Parameters
    ----------
    mask : Mask
        A mask, as it is handed to `attlas.attend`.
    m, n : int, optional
        Number of queries and of keys; the default is what the mask says of itself, else 70 and 150.
    batch, heads : int, default 1
        Sizes of the leading axes that it is made for.

    Raises
    ------
    ContractError
        If `allows` gives a wrong shape or dtype, or a tile that differs from that part of the whole mask; if
        `coverage` says EMPTY or FULL of a tile of which it is not so; if the output differs from that of the
        definition.

    See Also
    --------
    check_score, check_statistic

    Notes
    -----
    ``BlockState.PARTIAL`` is always right, so a mask that never skips a tile passes. Cost: a second.

    Examples
    --------
    >>> import attlas
    >>> class Even(attlas.Mask):
    ...     def allows(self, at):
    ...         return at.j % 2 == 0
    >>> attlas.testing.check_mask(Even())
    >>> class Hasty(Even):  # skips what it should not
    ...     def coverage(self, at):
    ...         return attlas.BlockState.EMPTY if len(at.columns) < 8 else attlas.BlockState.PARTIAL
    >>> attlas.testing.check_mask(Hasty())
    Traceback (most recent call last):
    attlas.errors.ContractError: check_mask(Hasty): coverage() must be EMPTY only where allows() is False everywhere.
      mask: Hasty()
      found: rows 0 to 34, columns 0 to 6 are said to be EMPTY, and 140 of 245 pairs may attend
      fix: return BlockState.PARTIAL where you cannot be sure: it costs time, and is always right.
    """
    if not isinstance(mask, Mask):
        raise ContractError("mask must be an attlas.Mask.", repr(mask), "from_function(mask_mod)", where="check_mask()")
    contract = _CheckedContract(f"check_mask({type(mask).__name__})", {"mask": mask.name()})
    own_m, own_n = mask.size()
    n = n or own_n or 150
    m = m or own_m or min(70, n)
    q, k = (
        _random_numbers(batch, heads, m, 3).requires_grad_(),
        _random_numbers(batch, heads, n, 3, seed=1).requires_grad_(),
    )
    try:
        problem = attend(q, k, mask=mask).problem
    except ShapeError as error:
        rule = "check() must accept the sizes that the mask is made for."
        fix = f"check_mask(mask, m={m}, n={n}, batch={batch}, heads={heads}) with the sizes that fit."
        raise contract.broken(rule, str(error).splitlines()[0], fix) from error
    whole = _allowed_of_tile(contract, mask, problem.tile(range(batch), range(heads), range(m), range(n)))
    for at in _sample_tiles(problem):
        _check_tile_of_mask(contract, mask, at, whole)
    _check_products(contract, lambda plan: attend(q, k, mask=mask, plan=plan), None)


def check_statistic(statistic: Statistic, dense: Callable[[Tensor], Any] | None = None) -> None:
    """Check that a statistic keeps the contract of `attlas.stats.Statistic`.

    Parameters
    ----------
    statistic : Statistic
        A statistic, as it is handed to `AttentionMatrix.collect`.
    dense : callable, optional
        What it should give: takes the whole weights, shape (batch, heads, m, n), in float64.

    Raises
    ------
    ContractError
        If the result depends on the plan, on an earlier run or on what else is collected; if it lacks the
        axes (batch, heads), or that of one head is not what it is in the whole; if a step writes into what
        other statistics read; if it differs from `dense`; if its gradient is not that of its steps; if `merge`, where
        it is defined, does not make the whole of two halves of the rows, or of the columns unless the statistic needs
        whole rows; or if `forms` does not say the shapes and dtypes of its result.

    See Also
    --------
    check_score, check_mask

    Notes
    -----
    The matrices are 2 × 3 heads of 13 × 17, causal and with holes, with and without a sink, and one whose
    first queries see no key, or one. In that one places (integers) are not compared, since several keys have
    weight 0 and which of them a place names is open; in the others every row sees 3 keys or more.
    Cost: under a second.

    Examples
    --------
    >>> import attlas
    >>> from attlas import stats
    >>> attlas.testing.check_statistic(stats.MaxWeight(), dense=lambda weights: weights.amax(-1))
    >>> attlas.testing.check_statistic(stats.MaxWeight(), dense=lambda weights: weights.sum(-1))
    Traceback (most recent call last):
    attlas.errors.ContractError: check_statistic(MaxWeight): the result must be that of the dense formula.
      statistic: MaxWeight
      found: off by 0.93 with plan Plan(backend='tiled', rows=None, columns=None, cells=None, gathered_bytes=None)
      fix: compare statistic and dense on one row; a row that sees no key has weights 0.
    """
    if not isinstance(statistic, Statistic):
        fix = "class MyStatistic(stats.Statistic)"
        raise ContractError("statistic must be a Statistic.", repr(statistic), fix, where="check_statistic()")
    name = type(statistic).__name__
    contract = _CheckedContract(f"check_statistic({name})", {"statistic": name})
    for sink in (None, _random_numbers(3, seed=7)):
        for mask in (None, _sampled_pairs(), Causal(-3)):
            q, k = _random_numbers(2, 3, 13, 4), _random_numbers(2, 3, 17, 4, seed=1)
            matrices = {plan: attend(q, k, mask=mask, sink=sink, plan=plan) for plan in _TESTED_PLANS}
            _check_results(contract, statistic, matrices, dense, ties=isinstance(mask, Causal))
            # A gradient from next to no memory takes as long as all the others, and one of the six matrices tells.
            hardest = sink is not None and mask is not None and not isinstance(mask, Causal)
            some = {plan: A for plan, A in matrices.items() if hardest or not plan.cells}
            _check_gradient(contract, statistic, some)


def _check_tiles_of_score(contract: _CheckedContract, problem: Problem) -> None:
    """Check that `forward` gives the same cells of a tile as of the whole matrix."""
    whole = _scores_of_tile(contract, problem, problem.tile(*map(range, problem.shape)))
    for tile in _sample_tiles(problem):
        contract.check_close(
            "a tile must equal that part of the whole matrix.",
            [_scores_of_tile(contract, problem, tile)],
            [_part_at_tile(whole, tile)],
            "let forward() look at q, k and at, pair by pair; what needs all tokens belongs into project().",
            found=f"{_place_in_words(tile)}, off by {{}}",
        )


def _scores_of_tile(contract: _CheckedContract, problem: Problem, at: Tile) -> Tensor:
    """Run `forward` on one tile, as the engine does."""
    rows: Any = slice(at.rows.start, at.rows.stop) if at.row_index is None else at.row_index
    columns: Any = slice(at.columns.start, at.columns.stop) if at.column_index is None else at.column_index
    b, h, _ = at.place
    q, k = problem.tokens
    logits = problem.score(tree_map(lambda t: t[b, h, rows], q), tree_map(lambda t: t[b, h, columns], k), at)
    if not _broadcasts_to_tile(logits, at) or not logits.is_floating_point():
        rule = "forward() must return floating point log-weights that broadcast to (batches, heads, rows, columns)."
        fix = "q.unsqueeze(-2) and k.unsqueeze(-3) give one cell for each pair; sum over the last axis."
        raise contract.broken(rule, _form_in_words(logits, at), fix)
    return logits.detach().double().expand(at.shape)


def _broadcasts_to_tile(result: Any, at: Tile) -> bool:
    """Return whether a result is a tensor that broadcasts to the shape of a tile."""
    if not isinstance(result, Tensor) or result.ndim > 4:
        return False
    return all(size in (1, full) for size, full in zip(result.shape[::-1], at.shape[::-1], strict=False))


def _form_in_words(result: Any, at: Tile) -> str:
    """Return shape and dtype of a result as text for an error: () and None for what is no tensor."""
    shape, dtype = tuple(getattr(result, "shape", ())), getattr(result, "dtype", None)
    return f"shape {shape}, {dtype}, for a tile of {at.shape}"


def _check_attributes_of_score(contract: _CheckedContract, problem: Problem) -> None:
    """Check what a score says of itself: finite, positional, as_dot."""
    score, at = problem.score, problem.tile(*map(range, problem.shape))
    logits = _scores_of_tile(contract, problem, at)
    if score.finite and not bool(logits.isfinite().all()):
        found = f"{int((~logits.isfinite()).sum())} of {logits.numel()} log-weights of finite tokens are not"
        rule = "a score that says finite = True must give finite log-weights."
        raise contract.broken(rule, found, "leave `finite` at False.")
    if score.positional:
        other = attend(problem.q.detach() + 1, problem.k.detach() - 1, score=score).problem
        rule = "a score that says positional = True must not look at the tokens."
        found, fix = "other tokens, other log-weights", "leave `positional` at False."
        contract.check_close(rule, [_scores_of_tile(contract, other, at)], [logits], fix, found)
        _check_bias(contract, score, at, logits)
    with torch.no_grad():
        try:
            dot = score.as_dot(*problem.tokens)  # type: ignore[arg-type]  # tokens in the score's own form
        except DtypeError as error:
            rule = "as_dot() must return an attlas.scores.Dot, or None."
            raise contract.broken(rule, error.found, error.fix) from error
        if dot is None:
            return
        product = dot.scale * torch.matmul(dot.q, dot.k.mT)
        product = product if dot.row is None else product + dot.row.unsqueeze(-1)
        product = torch.tanh(product / dot.cap) * dot.cap if dot.cap else product
        product = product if dot.bias is None else product + dot.bias(problem.q, problem.k, at)
    rule, fix = "as_dot() must be the score that forward() gives.", "check scale, row, bias and cap; or return None."
    contract.check_close(rule, [product.expand(at.shape)], [logits], fix)


def _check_bias(contract: _CheckedContract, score: Score, at: Tile, logits: Tensor) -> None:
    """Check what a score of places says that kernels may add, for the whole matrix and a window of it."""
    rows, columns = at.rows[1:] or at.rows, at.columns[1:] or at.columns
    for part in (at, replace(at, rows=rows), replace(at, columns=columns)):
        with torch.no_grad():
            bias = score.bias(part)
            if bias is None:
                continue
            found = bias.cells(part).expand(part.shape)
        wanted = logits.detach().expand(at.shape)[..., part.rows.start :, part.columns.start :]
        rule, fix = (
            "bias() must be the score that forward() gives.",
            "count from at.rows and at.columns, or return None.",
        )
        contract.check_close(rule, [found], [wanted], fix)


def _check_products(contract: _CheckedContract, make: Callable[[Plan], AttentionMatrix], score: Score | None) -> None:
    """Check output and gradients of all plans against the definition, and that against finite differences."""
    exact = make(Plan("reference"))
    q, k, n = exact.problem.q, exact.problem.k, exact.problem.shape[3]
    v = _random_numbers(n, 3, seed=2).requires_grad_()
    leaves = [q, k, v, *(p for p in (() if score is None else score.parameters()) if p.requires_grad)]
    names = ["q", "k", "v", *(f"parameter {i} {tuple(p.shape)}" for i, p in enumerate(leaves[3:]))]
    wanted = exact @ v
    slope = _random_numbers(*wanted.shape, seed=3)  # the gradient of some loss in the output
    gradients = _gradients_of_leaves(wanted, leaves, slope)
    for plan in _PLANS_FOR_MASKS if score is None else _TESTED_PLANS:
        out = make(plan) @ v
        rule = "the output must be that of the definition, whatever the plan."
        fix = "compare A[:, :] with the formula on a small matrix."
        contract.check_close(rule, [out.detach()], [wanted.detach()], fix, f"off by {{}} with {plan}")
        rule = "the gradients must be those of the definition, whatever the plan."
        fix = "keep to torch's operations, or check the backward of your own."
        _compare_gradients(contract, rule, fix, names, _gradients_of_leaves(out, leaves, slope), gradients, plan)
    if score is None:
        return
    try:
        torch.autograd.gradcheck(lambda *_: make(Plan("reference")) @ v, leaves, fast_mode=True)
    except RuntimeError as error:
        rule = "the gradients of forward() must be those of finite differences."
        fix = "check the backward of your own autograd function, and where a parameter is detached."
        raise contract.broken(rule, str(error).strip().splitlines()[0][:100], fix) from error


def _compare_gradients(
    contract: _CheckedContract, rule: str, fix: str, names: Sequence[str], results: list[Tensor],
    expected: list[Tensor],
    plan: Plan,
) -> None:  # fmt: skip
    """Raise the error of a rule unless each gradient is the expected one, relative to its largest number."""
    for name, a, b in zip(names, results, expected, strict=False):  # the last name is left where there is no sink
        scale = max(1.0, float(b.abs().max()) if b.numel() else 1.0)
        if (error := _largest_difference(a, b)) > _CLOSE_TOLERANCE * scale:
            raise contract.broken(rule, f"gradient of {name} off by {error:.2g} with {plan}", fix)


def _check_tile_of_mask(contract: _CheckedContract, mask: Mask, at: Tile, whole: Tensor) -> None:
    """Check `allows` and `coverage` of one tile against `whole`, the mask of the whole matrix."""
    allowed = _allowed_of_tile(contract, mask, at)
    wanted = _part_at_tile(whole, at)
    if not torch.equal(allowed, wanted):
        found = f"{_place_in_words(at)}, {int((allowed != wanted).sum())} of {allowed.numel()} pairs differ"
        fix = "ask at.i, at.j, at.b and at.h for places: they count in the whole matrix."
        raise contract.broken("a tile must equal that part of the whole mask.", found, fix)
    coverage = mask.coverage(at)
    wrong = {BlockState.EMPTY: bool(wanted.any()), BlockState.FULL: not bool(wanted.all())}
    if wrong.get(coverage, False):
        rule = f"coverage() must be {coverage.name} only where allows() is {coverage is BlockState.FULL} everywhere."
        count = f"{int(wanted.sum())} of {wanted.numel()} pairs may attend"
        fix = "return BlockState.PARTIAL where you cannot be sure: it costs time, and is always right."
        raise contract.broken(rule, f"{_place_in_words(at)} are said to be {coverage.name}, and {count}", fix)


def _allowed_of_tile(contract: _CheckedContract, mask: Mask, at: Tile) -> Tensor:
    """Run `allows` on one tile; raise an error if shape or dtype of the result is wrong."""
    allowed = mask.allows(at)
    if not _broadcasts_to_tile(allowed, at) or allowed.dtype is not torch.bool:
        rule = "allows() must return a bool tensor that broadcasts to (batches, heads, rows, columns)."
        fix = "compare at.i and at.j, whose shapes broadcast: at.j <= at.i."
        raise contract.broken(rule, _form_in_words(allowed, at), fix)
    return allowed.expand(at.shape)


def _check_results(
    contract: _CheckedContract,
    statistic: Statistic,
    matrices: dict[Plan, AttentionMatrix],
    dense: Callable[[Tensor], Any] | None,
    ties: bool,
) -> None:
    """Check the results of a statistic in all plans, twice, beside others, of one head, merged, and against `dense`.

    `ties` says that several keys of a row have the same weight: results of integers are then not compared.
    """
    first = next(iter(matrices.values()))
    mass = RowMass()
    for t in _tensors_of_result(operations.collect(first.problem, (statistic,), first.plan)[0]):
        if tuple(t.shape[:2]) != (2, 3):
            fix = "carry (batch, heads, ...) and write into carry[at.place]."
            rule = "the first axes of a result must be (batch, heads)."
            raise contract.broken(rule, f"shape {tuple(t.shape)}, expected (2, 3, ...)", fix)

    def parts(result: Any) -> list[Tensor]:
        # Integers are places, and which of several equal keys a place names is open.
        return [t for t in _tensors_of_result(result) if t.is_floating_point() or not ties]

    _check_forms(contract, statistic, first)
    wanted = [t.clone() for t in parts(first.collect(statistic)[0])]
    again = "start() must return a fresh carry."
    contract.check_close("a second run gives the same result.", parts(first.collect(statistic)[0]), wanted, again)
    for plan, A in matrices.items():
        fix = "sum over parts; leave nothing to their order."
        contract.check_close(f"{plan} gives the same result.", parts(A.collect(statistic)[0]), wanted, fix)
    beside = first.collect(statistic, mass, statistic)
    contract.check_close("it gives the same result beside others.", parts(beside[2]), wanted, again)
    rule, fix = "a step must not write into the tensors of its part.", "work on a copy: part.weights.clone()."
    contract.check_close(rule, [beside[1]], first.collect(mass), fix, "other statistics change")
    one = parts(first[1, 2].collect(statistic)[0])
    rule, found = "a head must give alone what it gives in the whole matrix.", "A[1, 2] differs from [1, 2] of A"
    contract.check_close(rule, one, [t[1, 2] for t in wanted], "do not mix batches or heads.", found)
    _check_merge(contract, statistic, first, wanted, parts)
    if dense is not None:
        expected = parts(dense(first.to_dense()))
        for plan, A in matrices.items():
            rule = "the result must be that of the dense formula."
            fix = "compare statistic and dense on one row; a row that sees no key has weights 0."
            contract.check_close(rule, parts(A.collect(statistic)[0]), expected, fix, f"off by {{}} with plan {plan}")


def _check_forms(contract: _CheckedContract, statistic: Statistic, A: AttentionMatrix) -> None:
    """Check that a statistic, where it says the forms of its result, says those that it has."""
    said = statistic.forms(A.problem) if statistic.describes("forms") else None
    found = _forms_of_result(A.collect(statistic)[0])
    if said is not None and said != found:
        rule = "forms() must say shape and dtype of each tensor of the result."
        raise contract.broken(rule, f"{said}, the result has {found}", "leave forms() out, or count the axes anew.")


def _forms_of_result(result: Any) -> Any:
    """Return the forms of a result of tensors."""
    if isinstance(result, Tensor):
        return TensorForm(tuple(result.shape), result.dtype)
    parts = [_forms_of_result(part) for part in result]
    return type(result)(*parts) if hasattr(result, "_fields") else tuple(parts)


@torch.enable_grad()
def _check_gradient(contract: _CheckedContract, statistic: Statistic, matrices: dict[Plan, AttentionMatrix]) -> None:
    """Check the gradient of a statistic against that of autograd through its steps over the whole matrix."""
    if not statistic.differentiable:
        return
    wanted: list[Tensor] = []
    for plan, A in matrices.items():
        problem = A.problem
        leaves = [t.detach().requires_grad_() for t in (problem.q, problem.k, problem.sink) if t is not None]
        A = attend(leaves[0], leaves[1], mask=problem.mask, sink=leaves[2] if leaves[2:] else None, plan=plan)
        with public(contract.where):
            wanted = wanted or _loss_gradients(graph.collect(A.problem, [statistic])[0], leaves)
        rule = "gradient() must give the gradient that autograd finds in the steps."
        fix = "derive it from finish(step(start())), cell by cell; or leave it out: autograd then runs the steps."
        results = _loss_gradients(A.collect(statistic)[0], leaves)
        _compare_gradients(contract, rule, fix, ("q", "k", "the sink"), results, wanted, plan)


def _loss_gradients(result: Any, leaves: list[Tensor]) -> list[Tensor]:
    """Return the gradients of a loss that weighs the numbers of a result."""
    terms = [
        (t.nan_to_num(0.0, 0.0, 0.0) * torch.linspace(-1, 2, t.numel(), dtype=t.dtype).view(t.shape)).sum()
        for t in _tensors_of_result(result)
        if t.requires_grad
    ]
    if not terms:
        return [torch.zeros_like(t) for t in leaves]
    loss = torch.stack([term.double() for term in terms]).sum()
    return _gradients_of_leaves(loss, leaves, torch.ones_like(loss))


@torch.no_grad()
def _check_merge(
    contract: _CheckedContract,
    statistic: Statistic,
    A: AttentionMatrix,
    wanted: list[Tensor],
    parts: Callable[[Any], list[Tensor]],
) -> None:
    """Check that the carries of two halves of a matrix are merged to that of the whole."""
    if type(statistic).merge is Statistic.merge:
        return
    problem, lse = A.problem, A.softmax_weights.lse()
    _, _, m, n = problem.shape
    halves = {"rows": [(range(m // 2), range(n)), (range(m // 2, m), range(n))]}
    if not statistic.whole_rows:
        halves["columns"] = [(range(m), range(n // 2)), (range(m), range(n // 2, n))]
    for what, spans in halves.items():
        carries = [_carry_after(statistic, problem, lse, *span) for span in spans]
        rule = f"merge() of two halves of the {what} must give the whole."
        fix = "join what start() and step() carry: sums add up, of maxima the larger stays."
        contract.check_close(rule, parts(statistic.finish(statistic.merge(*carries))), wanted, fix)


def _carry_after(statistic: Statistic, problem: Problem, lse: Tensor, rows: range, columns: range) -> Any:
    """Return the state of a statistic after some rows and columns of a matrix."""
    batch, heads, _, n = problem.shape
    at = problem.tile(range(batch), range(heads), rows, columns)
    row_block = RowBlock(at, column_blocks(at, problem.mask, n, whole_rows=statistic.whole_rows))
    carry = statistic.start(problem)
    for part in tiled.parts(problem, row_block, lse, Workspace(problem.dtype, problem.device)):
        carry = statistic.step(carry, part, part.at)
    return carry


def _sample_tiles(problem: Problem) -> Iterator[Tile]:
    """Yield tiles of several sizes, and lists of places, of every batch and head and of all together."""
    batch, heads, m, n = problem.shape
    generator = torch.Generator().manual_seed(5)
    for step_m, step_n in ((3, 4), (1, 5), (64, 64), (1, n)) if m * n < 2000 else ((64, 64), (35, 7), (1, n)):
        for rows in cut(m, step_m):
            for columns in cut(n, max(step_n, 1)):
                yield problem.tile(range(batch), range(heads), rows, columns)
    for b in cut(batch, 1):
        for h in cut(heads, 1):
            at = problem.tile(b, h, range(m), range(n))
            yield at
            places = torch.randint(m, (4,), generator=generator), torch.randint(n, (5,), generator=generator)
            yield replace(at, rows=range(4), row_index=places[0])
            yield replace(at, columns=range(5), column_index=places[1])
            yield replace(at, rows=range(4), columns=range(5), row_index=places[0], column_index=places[1])


def _part_at_tile(whole: Tensor, at: Tile) -> Tensor:
    """Return the cells of a tile from a tensor of the whole matrix, shape (batch, heads, m, n)."""
    b, h, _ = at.place
    return whole[b, h][:, :, at.i.flatten()][..., at.j.flatten()]


def _place_in_words(at: Tile) -> str:
    """Return the rows and columns of a tile as text for an error."""
    rows, columns = at.i.flatten().tolist(), at.j.flatten().tolist()
    if at.scattered:
        return f"rows {rows}, columns {columns}" if len(rows) + len(columns) < 20 else "a list of rows or columns"
    return f"rows {rows[0]} to {rows[-1]}, columns {columns[0]} to {columns[-1]}"


def _sampled_pairs() -> Mask:
    """Return a causal mask of a function that also hides one pair in seven."""
    return from_function(lambda b, h, i, j: (i * 5 + j * 3 + h) % 7 != 0) & Causal()


def _random_numbers(*shape: int, seed: int = 0) -> Tensor:
    """Return normal random numbers in float64, the same for the same seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _gradients_of_leaves(out: Tensor, leaves: list[Tensor], slope: Tensor) -> list[Tensor]:
    """Return the gradients in leaves of `out`, given the one in `out`; zeros where there is none."""
    found = torch.autograd.grad(out, leaves, slope, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(leaves, found, strict=True)]


def _tensors_of_result(result: Any) -> list[Tensor]:
    """Return the tensors of a result, nested or not, as a list."""
    return tree_flatten(result if isinstance(result, Tensor) else tuple(result))


def _largest_difference(a: Tensor, b: Tensor) -> float:
    """Return the largest difference; equal infinities and equal NaN count as 0, other shapes as infinity."""
    if a.shape != b.shape:
        return float("inf")
    a, b = a.double(), b.double()
    gap = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())
    return float(gap.nan_to_num(nan=float("inf")).max()) if gap.numel() else 0.0
