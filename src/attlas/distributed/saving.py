"""One folder for what several ranks recorded: each writes its part of every tensor, and all or nothing appears."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from attlas.distributed.agree import agreed, gathered
from attlas.distributed.recordings import Divided, described, joined, tensors_of
from attlas.engine.problem import spread_heads
from attlas.errors import RecordingError, ShapeError, kind
from attlas.recording.atlas import Atlas
from attlas.recording.atlas.storage import Writer
from attlas.recording.atlas.tensors import Written, fingerprint, header_of, sha256_of

_INTEGERS_BY_BYTES = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}


@torch.no_grad()
def save(
    atlas: Atlas,
    folder: str | os.PathLike[str],
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    overwrite: bool = False,
) -> None:
    """Write what all ranks recorded to one folder, from which `attlas.load` makes the atlas of one process.

    Parameters
    ----------
    atlas : Atlas
        What this rank recorded. Every rank of the mesh calls this function.
    folder : str or Path
        Where it goes, on a file system that all ranks share. It appears when it is complete, or not at all.
    mesh : DeviceMesh
        The ranks.
    placements : sequence of Placement
        For each dimension of the mesh, what it divides: ``Shard(0)`` the sequences of the batch (data parallelism),
        ``Shard(1)`` the heads (tensor parallelism), ``Replicate()`` nothing. Layers that are not divided along
        ``Shard(1)`` are taken from the first rank.
    overwrite : bool, default False
        Whether an atlas that is there already is replaced.

    Raises
    ------
    ShapeError
        If `placements` do not say this for each dimension.
    RecordingError
        If the parts do not fit together (texts of different lengths, other layers), the folder is there, or cannot be
        written, or a part on disk is not what its rank wrote.
    DtypeError
        If something in the atlas cannot be stored.

    See Also
    --------
    attlas.Atlas.save : the same for one process.

    Notes
    -----
    The files are those of one process; each rank writes its part of every tensor into them. Then ranks read parts of
    others back and compare checksums, and one rank gives the folder its name. If a rank fails, all raise its error, and
    nothing is left. If a rank dies, the collectives of the others raise, and only a hidden folder is left, which the
    next writer removes. Texts, names and details are those of the first rank; token ids and texts of ``Shard(0)`` are
    joined.

    Sent: plain data of each entry, its mask and checksums. Read and written: each byte twice.

    Examples
    --------
    >>> import tempfile, torch, attlas
    >>> from attlas.distributed import save
    >>> from torch.distributed import HashStore, destroy_process_group, init_process_group
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> from torch.distributed.tensor import Shard
    >>> init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    >>> A = attlas.attend(torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8))
    >>> atlas = attlas.Atlas([attlas.Entry("attn", 0, "self", 0, (0, 1), (0, 5), 0, (1, 2, 5, 5), A)])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(atlas, f"{folder}/run.atlas", init_device_mesh("cpu", (1,)), [Shard(1)])
    ...     attlas.load(f"{folder}/run.atlas")[0].shape
    torch.Size([1, 2, 5, 5])
    >>> destroy_process_group()
    """
    if atlas.parts:
        rule = "parts of the residual stream are saved by one process, and not with those of others."
        raise RecordingError(rule, "a recording with parts", "atlas.save(folder), or atlas.parts.clear() first.")
    grid = gathered(mesh, lambda: _grid_of_ranks(mesh, placements))[distributed.get_rank()]
    told = gathered(
        mesh,
        lambda: (described(atlas), atlas.texts, atlas.encoder_texts, None if atlas.ids is None else atlas.ids.cpu()),
    )
    first = [told[row[0]] for row in grid]

    def join() -> tuple[Atlas, dict[str, dict[str, Divided]]]:
        """Return the joined atlas of all ranks, and where each rank's tensors lie."""
        whole, divided = joined(atlas, {rank: entries for rank, (entries, *_) in told.items()}, grid)
        _, texts, encoder_texts, ids = zip(*first, strict=True)
        whole.texts, whole.encoder_texts, whole.ids = (
            _texts_of_ranks(texts),
            _texts_of_ranks(encoder_texts),
            _ids_of_ranks(ids),
        )
        whole.model, whole.spans, whole.details = atlas.model, atlas.spans, atlas.details
        return whole, divided

    whole, divided = agreed(mesh, join)
    with _SharedWriter(folder, overwrite, mesh, divided, atlas) as writer:
        writer.finish(whole.entries, whole.facts, whole.bookmarks)


def _grid_of_ranks(mesh: DeviceMesh, placements: Sequence[Placement]) -> list[list[int]]:
    """Return the ranks as a table: rows for parts of the batch, columns for parts of the heads."""
    placements = list(placements)
    known = len(placements) == mesh.ndim and all(
        isinstance(p, Replicate) or (isinstance(p, Shard) and p.dim in (0, 1)) for p in placements
    )
    if not known:
        rule = "placements must be Shard(0), Shard(1) or Replicate() for each dimension of the mesh."
        fix = "Shard(0) where ranks read different texts, Shard(1) where they have different heads."
        raise ShapeError(rule, f"{placements} for a mesh of {mesh.ndim} dimensions", fix, where="save()")
    ranks = mesh.mesh[tuple(0 if isinstance(p, Replicate) else slice(None) for p in placements)]
    axes = [p.dim for p in placements if isinstance(p, Shard)]
    order = sorted(range(len(axes)), key=axes.__getitem__)
    batches = math.prod(ranks.shape[i] for i, axis in enumerate(axes) if axis == 0)
    return ranks.permute(order).reshape(batches, -1).tolist()


def _texts_of_ranks(parts: Sequence[Any]) -> list[list[str]] | None:
    """Return the texts of all ranks in one list; None where a rank has none."""
    return None if any(part is None for part in parts) else [text for part in parts for text in part]


def _ids_of_ranks(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Return the token ids of all ranks in one tensor; None where no rank has ids."""
    known = [part for part in parts if part is not None]
    if not known:
        return None
    if len(known) < len(parts) or len({part.shape[1:] for part in known}) > 1:
        found = ", ".join(kind(part) if part is None else str(tuple(part.shape)) for part in parts)
        fix = "pad the texts of all ranks to one length, with an attention_mask."
        raise RecordingError("ranks must have token ids of one length.", found, fix, where="save()")
    return torch.cat(known)


class _SharedWriter(Writer):
    """A Writer whose files all ranks write together; each calls it with the same atlas.

    Parameters
    ----------
    folder, overwrite, mesh
        As of `save`.
    divided : dict
        By entry and name, the tensors whose parts are on several ranks.
    own : Atlas
        What this rank recorded.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        overwrite: bool,
        mesh: DeviceMesh,
        divided: dict[str, dict[str, Divided]],
        own: Atlas,
    ) -> None:
        self.mesh, self.rank, self.ranks = mesh, distributed.get_rank(), mesh.mesh.flatten().tolist()
        # By the identity of the tensors that stand for the whole ones in the atlas that is written.
        self.divided = {id(one.whole): one for found in divided.values() for one in found.values()}
        self.own: dict[int, Tensor] = {}
        for entry in own.entries:
            found = divided[f"{entry.path}, call {entry.call}"]
            mine = tensors_of(entry)
            if "query_mask" in found and "query_mask" not in mine:
                mine["query_mask"] = torch.ones(entry.shape[0], entry.shape[2], dtype=torch.bool)
            if "k" in mine and self.rank in found["k"].places:
                heads = found["k"].places[self.rank][1]
                mine["k"] = spread_heads(mine["k"], heads.stop - heads.start)
            self.own |= {id(one.whole): mine[name] for name, one in found.items() if name in mine}
        super().__init__(folder, overwrite)

    @property
    def leads(self) -> bool:
        """Whether this rank makes the folder and gives it its name."""
        return bool(self.rank == self.ranks[0])

    def begin(self) -> tuple[Path, int]:
        """Return the folder that is written to, and its lock; the rank that leads makes both.

        Other ranks get an open file that stands for the lock.
        """
        lock = os.open(os.devnull, os.O_RDONLY)

        def make() -> str:
            """Create the folder on the rank that leads; return its name, "" on others."""
            nonlocal lock
            if not self.leads:
                return ""
            os.close(lock)
            partial, lock = super(_SharedWriter, self).begin()
            return partial.name

        name = gathered(self.mesh, make)[self.ranks[0]]
        return self.folder.with_name(name), lock

    def close(self) -> None:
        """Close the writer; on ranks that do not lead, there is only the file that stands for the lock."""
        if self.leads:
            super().close()
        elif not self._done:
            self._done = True
            os.close(self._lock)

    def part(self, name: str, t: Tensor) -> Tensor:
        # A tensor of no memory that stands for one of all ranks is not copied.
        return t if id(t) in self.divided else super().part(name, t)

    def write(self, name: str, tensors: Mapping[str, Tensor]) -> Written:
        """Write a file together: the rank that leads creates it, each fills in its parts, and one verifies it."""
        path = self.partial / name
        header, starts, size = header_of(tensors)
        # For its effect: all ranks wait until the file is there, or raise the error of the one that leads.
        gathered(self.mesh, lambda: self._create_file(path, header, size) if self.leads else None)
        marks = gathered(self.mesh, lambda: self._write_parts_of_rank(path, tensors, starts))
        # Another rank than the one that leads reads the next file, so that the reading is shared.
        reader = self.ranks[len(self.files) % len(self.ranks)]

        def check() -> Written | None:
            """Verify the file on one rank; None on others."""
            return self._verified_file(path, tensors, starts, marks, size) if self.rank == reader else None

        return gathered(self.mesh, check)[reader] or Written(size, "")

    def _create_file(self, path: Path, header: bytes, size: int) -> None:
        """Create a file of `size` bytes that begins with a header."""
        with self.errors_name_folder(), path.open("xb") as file:
            file.write(header)
            file.truncate(size)

    def _places_of_parts(self, tensors: Mapping[str, Tensor], rank: int) -> dict[str, tuple[slice, ...]]:
        """Return where a rank's parts lie in the tensors, by name; a tensor that is not divided is the first rank's."""
        found = {}
        for name, t in tensors.items():
            one = self.divided.get(id(t))
            places = {self.ranks[0]: (slice(None),) * t.ndim} if one is None else one.places
            if rank in places:
                found[name] = places[rank]
        return found

    def _mapped_tensor(self, path: Path, name: str, tensors: Mapping[str, Tensor], start: int, mode: Any) -> Tensor:
        """Return a tensor of a file, from byte `start` on, as a memory map in a mode of numpy."""
        t = tensors[name]
        numbers = np.memmap(
            path, dtype=_INTEGERS_BY_BYTES[t.element_size()], mode=mode, offset=start, shape=tuple(t.shape)
        )
        found = torch.from_numpy(numbers)
        return found.view(t.dtype) if t.dtype is not torch.bool else found.view(torch.bool)

    def _write_parts_of_rank(
        self, path: Path, tensors: Mapping[str, Tensor], starts: Mapping[str, int]
    ) -> dict[str, str]:
        """Write this rank's parts, and return their checksums by the name of the tensor."""
        marks = {}
        with self.errors_name_folder():
            for name, place in self._places_of_parts(tensors, self.rank).items():
                t = tensors[name]
                own = self.own.get(id(t), t).detach().cpu()
                marks[name] = fingerprint(own)
                if own.numel():
                    self._mapped_tensor(path, name, tensors, starts[name], "r+")[place].copy_(own)
            with path.open("rb+") as file:
                os.fsync(file.fileno())
        return marks

    def _verified_file(
        self,
        path: Path,
        tensors: Mapping[str, Tensor],
        starts: Mapping[str, int],
        marks: Mapping[int, Mapping[str, str]],
        size: int,
    ) -> Written:
        """Compare what is on disk with the checksums of all ranks, and return size and checksum of the file.

        `starts` has the first byte of each tensor, `marks` the checksums that each rank has of its parts, by tensor.
        """
        for rank, own in marks.items():
            for name, place in self._places_of_parts(tensors, rank).items():
                t = tensors[name]
                # Copy on write: torch then takes the map without a warning, and nobody writes.
                read = self._mapped_tensor(path, name, tensors, starts[name], "c") if t.numel() else t
                if fingerprint(read[place]) != own[name]:
                    rule, fix = "a part must be on disk as its rank wrote it.", "a folder that all ranks share."
                    found = f"{name} of rank {rank} in {path.name} is another"
                    raise RecordingError(rule, found, fix, folder=str(self.folder), where="save()")
        return Written(size, sha256_of(path))

    def seal(self, content: Mapping[str, Any]) -> None:
        # The rank that leads does it for all.
        gathered(self.mesh, lambda: super(_SharedWriter, self).seal(content) if self.leads else None)
