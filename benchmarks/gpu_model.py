"""What the machine code of the Triton kernels says, for GPUs that are not here; needs triton, and no GPU.

    python benchmarks/gpu_model.py          # all kernels for all GPUs, 15 minutes; writes results/gpu-model.json

Each kernel is compiled ahead of time, in the shapes that attlas launches it in, and its machine code is read:
registers, spilled bytes, shared memory, programs that fit on a multiprocessor, instructions of the loop over tiles. For
Hopper a time is predicted. These are **predictions, no measurements**: the three constants below were fitted to 20
readings of four other kernels on one H200, which the model then explains with rms 7 % and at worst 20 %.
"""

import argparse
import collections
import itertools
import json
import math
import os
import re
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from importlib import import_module
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "gpu-model.json"

ARCHITECTURES = (80, 86, 89, 90, 100, 120, "gfx942")
SIZES = (64, 128, 256)
#: Bytes of shared memory of a multiprocessor, and those that one program may have.
SHARED = {
    **dict.fromkeys((80,), (167936, 166912)),
    **dict.fromkeys((86, 89, 120), (102400, 101376)),
    **dict.fromkeys((90, 100), (233472, 232448)),
}
#: Bytes of shared memory of a workgroup on gfx942.
LDS = 65536

# 132 multiprocessors at GHZ, products at 1 / TENSOR of the matrix units' rate; of what two programs on one could hide
# behind each other the part MISSED is not hidden.
MULTIPROCESSORS, GHZ, TENSOR, MISSED = 132, 1.81, 1.6, 0.5
CUDNN = {128: 3.817, 64: 2.492}  # ms of cuDNN's forward on an H200, measured: bfloat16, 32 heads, 16,384 tokens, causal
CELLS = 32 * 16384 * (16384 + 128) / 2 * 1.05  # of these, with 5 % for masked tiles and the end of the grid

PAIRS = 8192 * 8192  # without a dot product

ROWS = {"ENTROPY", "SQUARES"}
#: The kernel of each case, the name of its shape, and the results that it is asked for.
CASES = {
    "numbers of rows": ("weights", "weights", ROWS),
    "rows, columns": ("weights", "weights", ROWS | {"SUMS"}),
    "rows, columns, floor of the largest": ("weights", "weights", ROWS | {"SUMS", "LARGEST", "FLOOR"}),
    "moments": ("weights", "moments", {"COUNT", "MEAN", "SPREAD"}),
    "diagonals": ("weights", "diagonals", {"OFFSETS"}),
    "log-sum-exp": ("online", "online", set()),
    "output, rows": ("online", "online", {"V", "OUT", "MOMENT", "SQUARES"}),
    "output, rows, floor of the largest": ("online", "online", {"V", "OUT", "MOMENT", "SQUARES", "FLOOR"}),
    "largest with keys": ("select", "select", {"FLOOR"}),
    "cells": ("cells", "cells", {"LSE", "LOWS"}),
    "gradients of queries": ("by_query", "by_query", {"LEFT", "RIGHT", "LOGS", "SQUARE", "COLUMN"}),
    "gradients of keys": ("by_key", "by_key", {"LEFT", "RIGHT", "LOGS", "SQUARE", "COLUMN", "POOLED"}),
    # Without a dot product: the kind, the dtype and the numbers of the values.
    "Additive, output": ("online", "online", {"WEIGHTS", "V", "OUT"}, 1, "bf16", 64),
    "Additive, output, float32": ("online", "online", {"WEIGHTS", "V", "OUT"}, 1, "fp32", 64),
    "Additive, rows, columns": ("weights", "weights", {"WEIGHTS", "SUMS"} | ROWS, 1, "bf16", 16),
    "Additive, gradients of units": ("units", "units", {"OWN_FAR", "OTHER_FAR", "SHARES"}, 1, "fp32", 16),
    "Laplace, output": ("online", "online", {"WEIGHTS", "V", "OUT"}, 3, "fp32", 16),
    "Laplace, rows, columns": ("weights", "weights", {"WEIGHTS", "SUMS"} | ROWS, 3, "fp32", 16),
}
#: Cases that ask for a part of what another one asks for: they are read for Hopper alone.
PARTS = {"numbers of rows", "rows, columns", "log-sum-exp", "output, rows"}
PARTS |= {"Additive, output, float32", "Laplace, output"}
#: Hidden units, and coordinates, by the kind.
UNITS_OF = {1: 128, 3: 8}
OPTIONAL = {
    "weights": {
        "ENTROPY",
        "SQUARES",
        "MASS",
        "LARGEST",
        "COUNT",
        "MEAN",
        "SPREAD",
        "FLOOR",
        "SUMS",
        "MAXIMA",
        "OFFSETS",
    },
    "online": {"V", "OUT", "MOMENT", "SQUARES", "COUNT", "MEAN", "SPREAD", "FLOOR"},
    "select": {"FLOOR"},
    "cells": {"LSE", "LOWS", "ROWS_AT", "COLUMNS_AT"},
    "units": {"OWN_FAR", "OTHER_FAR", "SHARES"},
    "by_query": {"LEFT", "RIGHT", "LOGS", "SQUARE", "COLUMN", "MEAN", "LINEAR", "CENTRE"},
    "by_key": {"LEFT", "RIGHT", "LOGS", "SQUARE", "COLUMN", "MEAN", "LINEAR", "CENTRE", "POOLED"},
}
INTEGERS = {"FIRST", "STOP", "STRIPS", "PLACES", "ROWS_AT", "COLUMNS_AT"}
TOKENS = {"Q", "K", "V", "OUT", "LEFT", "RIGHT"}


def build(case, d, arch, dtype="bf16", asked=(), **further):
    """Compile a case for tokens of d numbers and a causal mask; pointers and strides are multiples of 16.

    `asked` names further pointers that are given, and `further` gives constants.
    """
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from attlas.engine.backends.triton.sizes import shape_of

    kernel, kind, own, *pairs = CASES[case]
    asked = own | set(asked)
    if pairs:  # d is then the number of hidden units or coordinates, and values have as many as it says
        further = {"KIND": pairs[0], "SIZE": d} | further
        dtype, d = pairs[1], pairs[2]
    fn = getattr(import_module(f"attlas.engine.backends.triton.kernels.{kernel}"), kernel)
    width = 1 << (d - 1).bit_length()
    major = 9 if isinstance(arch, str) else arch // 10
    changed = bool({"KEYS", "DISTANCES"} & asked or further.get("CAP"))
    shape = shape_of(
        kind,
        torch.float32 if dtype == "fp32" else torch.bfloat16,
        width,
        1 << 14,
        changed=changed,
        pairs=bool(pairs),
        major=major,
    )
    has_floor, has_values = "FLOOR" in asked, bool({"V", "LEFT"} & asked)
    constants = {
        **dict.fromkeys(({"KEYS", "DISTANCES", "STRIPS", "WEIGHTS"} | OPTIONAL[kernel]) - asked),
        "D": width,
        "SIZE": d,
        "E": width if has_values else 16,
        "VALUES": d if has_values else 1,
        "KIND": 0,
        "CAP": False,
        "PTX": not isinstance(arch, str),
        "LOG": False,
        "ROWS": shape.rows,
        "COLS": shape.columns,
        "CLASSES": min(32, shape.columns) if has_floor else 1,
        "SLOTS": 8,
        "UNITS": 128 if pairs and pairs[0] == 1 else 16,
        "TOP": 8 if has_floor else 0,
        **further,
    }
    constants = {name: value for name, value in constants.items() if name in fn.arg_names}
    types = {
        name: _type(name, "fp32" if pairs and name in ("Q", "K") else dtype)
        for name in fn.arg_names
        if name not in constants
    }
    signature = {name: "constexpr" if name in constants else types[name] for name in fn.arg_names}
    aligned = {"m", "n"} if not pairs else set()
    aligned |= {f"{t}_{axis}" for t in ("q", "k", "v", "left", "right") for axis in ("batch", "head", "row")}
    attrs = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(fn.arg_names)
        if signature[name].startswith("*") or (name in aligned and name not in constants)
    }
    target = GPUTarget("hip", arch, 64) if isinstance(arch, str) else GPUTarget("cuda", arch, 32)
    source = ASTSource(fn, signature=signature, constexprs=constants, attrs=attrs)
    return triton.compile(source, target=target, options=shape.settings), shape


def _type(name, dtype):
    if name in TOKENS:
        return f"*{dtype}"
    if name in INTEGERS:
        return "*i32"
    if name in ("scale2", "rate", "scale"):
        return "fp32"
    return "*fp32" if name.isupper() else "i32"


def tool(kernel, name, *flags):
    """Run a tool of the wheel of triton on a compiled kernel."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        return subprocess.run([tools / name, *flags, file.name], capture_output=True, text=True, check=True).stdout


def resources(kernel):
    """Return registers and spilled bytes of a thread, shared memory, and how many programs a multiprocessor holds."""
    shared, warps, arch = kernel.metadata.shared, kernel.metadata.num_warps, kernel.metadata.target.arch
    if isinstance(arch, str):
        return {"shared": shared, "fits": shared <= LDS}
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", tool(kernel, "cuobjdump", "-res-usage"))
    registers, stack, _, local = map(int, found.groups())
    whole, one = SHARED[arch]
    held = min(65536 // (math.ceil(registers / 8) * 8 * 32 * warps), whole // (shared + 1024), 64 // warps)
    return {
        "registers": registers,
        "spilled": stack + local,
        "shared": shared,
        "fits": shared <= one,
        "programs": held if shared <= one else 0,
    }


def instructions(kernel):
    """Return (address, opcode, operands) of each instruction, in order."""
    line = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?);")
    found = (line.match(text) for text in tool(kernel, "cuobjdump", "-sass").splitlines())
    return [(int(m[1], 16), m[2], m[3]) for m in found if m]


def main_loop(code):
    """Return one turn of the first loop that holds matrix products, without rare branches."""
    place = {address: i for i, (address, *_) in enumerate(code)}
    loops = []
    for i, (address, opcode, operands) in enumerate(code):
        target = re.search(r"0x([0-9a-f]+)", operands) if opcode.startswith("BRA") else None
        if target and int(target[1], 16) < address:
            loops.append((place[int(target[1], 16)], i))
    products = ("HGMMA", "HMMA", "UTCHMMA", "FFMA")
    found = [(lo, hi) for lo, hi in loops if any(o.startswith(products[:3]) for _, o, _ in code[lo:hi])]
    found = [a for a in found if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in found)]  # innermost
    if not found:
        return []
    i, stop = min(found)
    path = []
    while i <= stop:
        path.append(code[i][1])
        if code[i][1].startswith("BRA") and i != stop:
            target = place[int(re.search(r"0x([0-9a-f]+)", code[i][2])[1], 16)]
            if i < target <= stop and not any(o.startswith((*products[:3], "WARPGROUP")) for _, o, _ in code[i:target]):
                i = target  # a rare update: taken to be skipped
                continue
        i += 1
    return path


def loops(code):
    """Return start and end of each loop."""
    place = {address: i for i, (address, *_) in enumerate(code)}
    targets = ((i, re.search(r"0x([0-9a-f]+)", operands)) for i, (_, o, operands) in enumerate(code) if o[:3] == "BRA")
    found = ((place.get(int(target[1], 16), i), i) for i, target in targets if target)
    return [(start, i) for start, i in found if start < i]


def loop_of_pairs(code, trips):
    """Return what one turn of the loop over tiles runs where a loop over units, of so many trips, makes the products.

    Of the loops over units it is the one with the most arithmetic for each exponential and load.
    """
    found = loops(code)
    start, stop = max(found, key=lambda a: a[1] - a[0])
    inner = [a for a in found if start < a[0] and a[1] < stop]
    inner = [a for a in inner if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in inner)]

    def arithmetic(a):
        path = [o for _, o, _ in code[a[0] : a[1] + 1]]
        return sum(o.startswith(("FFMA", "FMUL", "FADD")) for o in path) * (not any("EX2" in o for o in path))

    best = max(inner, key=arithmetic, default=None)
    inside = {i for a in inner for i in range(a[0], a[1] + 1)}
    around = [code[i][1] for i in range(start, stop + 1) if i not in inside]
    return around, [] if best is None else [o for _, o, _ in code[best[0] : best[1] + 1]] * trips


def without_exponentials(code):
    """Return one turn of the largest loop without its branches that take exponentials, for hidden units far from 0."""
    start, stop = max(loops(code), key=lambda a: a[1] - a[0])
    place = {address: i for i, (address, *_) in enumerate(code)}
    edges = {start, stop + 1}
    for i in range(start, stop + 1):
        if code[i][1].startswith("BRA"):
            target = place.get(int(re.search(r"0x([0-9a-f]+)", code[i][2])[1], 16), start)
            edges |= {i + 1, target} if start <= target <= stop else {i + 1}
    cut = sorted(edges)
    blocks = ([o for _, o, _ in code[a:b]] for a, b in itertools.pairwise(cut))
    return [o for block in blocks if not any("EX2" in o for o in block) for o in block]


UNITS = {
    "MUFU": "special",
    "LDL": "spill",
    "STL": "spill",
    "BAR": "barrier",
    **dict.fromkeys(("FFMA", "FADD", "FMUL", "HFMA2", "HADD2", "HMUL2", "IMAD"), "fma"),
    **dict.fromkeys(("LDS", "STS", "LDSM", "STSM", "SHFL"), "shared"),
    **dict.fromkeys(("LDG", "STG", "LDGSTS", "ATOMG", "RED", "REDG", "UTMALDG"), "global"),
}
CONTROL = [
    "WARPGROUP",
    "DEPBAR",
    "SYNCS",
    "LDGDEPBAR",
    "MEMBAR",
    "FENCE",
    "NOP",
    "WARPSYNC",
    "BSYNC",
    "BSSY",
    "BRA",
    "R2UR",
    "S2UR",
    "S2R",
    "MOV",
]
BUSY = {"special": 8, "alu": 2, "shared": 4}  # cycles of a quarter of a multiprocessor for a warp; others 1


def unit(opcode):
    """Return the unit that an instruction occupies."""
    name = opcode.split(".")[0]
    if name == "HGMMA":
        return "tensor"
    return UNITS.get(name, "control" if name in CONTROL or name.startswith("U") else "alu")


def _product(opcode):
    """Return the cycles of the matrix units for one instruction of a warpgroup."""
    return 64 * math.prod(map(int, re.match(r"HGMMA(?:\.SP)?\.64x(\d+)x(\d+)", opcode).groups())) / 2048


def turn(path, warps):
    """Return the cycles of one turn of a program: with its units in step, and if they overlapped perfectly."""
    share, now, tensor = warps / 4, 0.0, 0.0
    behind, work = dict.fromkeys(BUSY, 0.0), collections.Counter()
    for again in (False, True):
        start = now
        for opcode in path:
            kind = unit(opcode)
            now += share
            work["issue"] += share * again
            if kind == "tensor":
                tensor = max(tensor, now) + TENSOR * _product(opcode) * share
                work["tensor"] += TENSOR * _product(opcode) * share * again
            elif kind in BUSY:
                behind[kind] = max(behind[kind], now - share) + BUSY[kind] * share
                work[kind] += BUSY[kind] * share * again
                now = max(now, behind[kind] - 64)
            elif opcode.startswith("WARPGROUP.DEPBAR"):
                now = max(now, tensor, *behind.values())
            elif kind == "barrier":
                now = max(now, *behind.values())
    return now - start, max(work.values())


def hidden(path):
    """Return the part of the exponentials that stand between the start of a product and the wait for it."""
    inside, total, under = False, 0, 0
    for opcode in path + path:  # twice: a product may be under way at the turn of the loop
        inside = True if opcode.startswith("HGMMA") else False if opcode.startswith("WARPGROUP.DEPBAR") else inside
        total += opcode.startswith("MUFU")
        under += opcode.startswith("MUFU") and inside
    return under / max(total, 1)


def read(case, d, arch, **further):
    """Return what the machine code of a case says."""
    kernel, shape = build(case, d, arch, **further)
    found = {
        "case": case,
        "d": d,
        "architecture": arch,
        "rows": shape.rows,
        "columns": shape.columns,
        **resources(kernel),
    }
    if isinstance(arch, str):
        return found
    cells, (pair_kind, *_) = shape.rows * shape.columns, [*CASES[case][3:], None]
    if pair_kind:
        code = instructions(kernel)
        if CASES[case][0] == "units":  # all units at once
            around, units = without_exponentials(code), []
        else:
            around, units = loop_of_pairs(code, d // 4 if pair_kind == 1 else d)
        return found | of_pairs(around, units, found["programs"], shape, arch)
    path = main_loop(instructions(kernel))
    found["spills_in_loop"] = sum(unit(opcode) == "spill" for opcode in path)
    found["instructions_a_cell"] = round(len(path) * 32 * shape.warps / cells, 2)
    if arch == 90 and path and found["programs"]:
        in_step, ideal = turn(path, shape.warps)
        cycles = in_step if found["programs"] == 1 else ideal + MISSED * (in_step - ideal)
        time = cycles * CELLS / cells / MULTIPROCESSORS / GHZ / 1e6
        found |= {"hidden": round(hidden(path), 2), "predicted_ms": round(time, 2)}
        if d in CUDNN:
            found["predicted_ratio_to_cudnn"] = round(time / CUDNN[d], 2)
    return found


def of_pairs(around, units, programs, shape, arch):
    """Return spills and instructions of a turn, and for Hopper the time of PAIRS pairs without a mask.

    Here loads count too: numbers of tokens come from the first cache, which gives 128 bytes a cycle, as shared memory.
    """
    path, cells = around + units, shape.rows * shape.columns
    found = {
        "spills_in_loop": sum(unit(opcode) == "spill" for opcode in around + units),
        "instructions_a_cell": round(len(path) * 32 * shape.warps / cells, 2),
    }
    if arch == 90 and programs:
        in_step, ideal = turn([opcode.replace("LDG", "LDS") for opcode in path], shape.warps)
        cycles = in_step if programs == 1 else ideal + MISSED * (in_step - ideal)
        found["predicted_ms"] = round(cycles * PAIRS / cells / MULTIPROCESSORS / GHZ / 1e6, 2)
    return found


@cache
def _pool(workers):
    return ProcessPoolExecutor(workers)


def _told(job):
    try:
        return read(*job)
    except Exception as error:  # noqa: BLE001 - one that a compiler refuses is a result too
        return dict(zip(("case", "d", "architecture"), job, strict=True)) | {"error": str(error)[:200]}


def main():
    import triton

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--missing", action="store_true", help="read what the results do not have yet, and keep the rest"
    )
    arguments = parser.parse_args()
    workers = arguments.workers
    about = {
        "what": "PREDICTIONS from machine code, no measurements: no GPU ran these kernels",
        "times": "ms of one H200, bfloat16, 32 heads, 16,384 tokens, causal; read them as +- 20 %",
        "times_of_pairs": "ms of one H200, 8,192 x 8,192 pairs, 128 hidden units or 8 coordinates",
        "cudnn_ms_measured": CUDNN,
        "triton": triton.__version__,
    }
    found = json.loads(RESULTS.read_text("utf-8"))["kernels"] if arguments.missing else []
    known = {(one["case"], one["d"], one["architecture"]) for one in found}
    for one in _pool(workers).map(_told, [job for job in jobs() if job not in known]):
        found.append(one)
        print(json.dumps(one), flush=True)
        RESULTS.write_text(json.dumps({"about": about, "kernels": found}, indent=1) + "\n", encoding="utf-8")


def jobs():
    """Return case, size of the tokens and architecture of each kernel that is read."""
    others = [arch for arch in ARCHITECTURES if arch != 90]
    dots, pairs = ([case for case, about in CASES.items() if bool(about[3:]) is kind] for kind in (False, True))
    found = [(case, d, 90) for d in SIZES for case in dots]
    found += [(case, d, arch) for d in SIZES for arch in others for case in dots if case not in PARTS]
    # Of hidden units and coordinates there is one size.
    size = {case: UNITS_OF[CASES[case][3]] for case in pairs}
    return found + [
        (case, size[case], arch) for arch in (90, *others) for case in pairs if case not in PARTS or arch == 90
    ]


if __name__ == "__main__":
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path(__file__).parent.parent / "build" / "triton"))
    main()
