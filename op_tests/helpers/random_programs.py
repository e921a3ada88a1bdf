"""Random C++ functions without undefined behaviour, which give the same bits on every machine and optimisation level.

Each is a function of four words, private tables, a slice of LDS and a slice of global memory. Integers wrap because
they are unsigned where it matters, shifts are masked, divisors are odd, indices are masked, float-to-integer
conversions are guarded, every half-precision operation is rounded where it is written, and NaNs are made canonical
where their bits become visible. The operands of unsigned divisions are hidden from the optimiser: clang 22 at -O0
divides sign-extended bytes as if they were 7-bit numbers (AMDGPU's 24-bit division), which is a compiler bug.
So are what is assigned in the cases of a switch (its structurizer moves free instructions such as element extractions
out of a case and onto other paths, llvm-project#183792) and what is rounded to half precision (it fuses a product with
the addend +0, which loses the sign of a negative zero, takes 0 - x for -x, and packs a constant -0 as +0), and the
operands of saturating 64-bit additions (a product's last addition is merged into the one whose carry decides).
"""

from __future__ import annotations

import random

from helpers.random_prelude import DEVICE, END, HOST, START, STARTING

INTEGERS = {"u8": 8, "i8": 8, "u16": 16, "i16": 16, "u32": 32, "i32": 32, "u64": 64, "i64": 64}
FLOATS = ("f16", "bf16", "f32", "f64")
VECTORS = {
    "u32x4": ("u32", 4), "i16x2": ("i16", 2), "u8x4": ("u8", 4), "i64x2": ("i64", 2),
    "f16x2": ("f16", 2), "f32x2": ("f32", 2), "f32x4": ("f32", 4), "f64x2": ("f64", 2),
}  # fmt: skip
SCALARS = (*INTEGERS, *FLOATS)
TYPES = (*SCALARS, *VECTORS)
# Words are what programs mostly compute with, and what helps the rarer types to meet each other.
WEIGHTS = [3 if kind in ("u32", "i32", "f32") else 1 for kind in TYPES]


class Writer:
    """Writes one function from a seed."""

    def __init__(self, name: str, seed: int) -> None:
        """Begin with no variables."""
        self.name = name
        self.rng = random.Random(seed)
        self.variables: dict[str, list[str]] = {kind: [] for kind in TYPES}
        self.lines: list[str] = []
        self.count = 0
        self.helpers: list[str] = []

    def pick(self, *options: str) -> str:
        return self.rng.choice(options)

    def scalar(self) -> str:
        return self.pick(*SCALARS)

    def constant(self, kind: str) -> str:
        rng = self.rng
        if kind in VECTORS:
            element, count = VECTORS[kind]
            return f"(({kind}){{{', '.join(self.constant(element) for _ in range(count))}}})"
        if kind in ("f16", "bf16"):
            number = self.pick("0.5f", "-1.25f", "3.0f", "6e4f", "6e-8f", f"{rng.uniform(-100, 100):.3f}f")
            return f"({kind})({number})"
        if kind == "f32":
            return self.pick(
                "0.5f", "-1.25f", "3.0f", "1e20f", "1e-30f", "-0.0f", f"{rng.uniform(-100, 100):.6g}f + 0.0f"
            )
        if kind == "f64":
            return self.pick("0.5", "-1.25", "3.0", "1e200", "1e-300", f"({rng.uniform(-100, 100)!r})")
        if INTEGERS[kind] == 64:
            return f"({kind}){rng.getrandbits(rng.choice((4, 20, 40, 63)))}ull"
        return f"({kind}){rng.getrandbits(rng.choice((3, 8, 16, 31)))}u"

    def leaf(self, kind: str) -> str:
        known = self.variables[kind]
        return self.rng.choice(known) if known and self.rng.random() < 0.8 else self.constant(kind)

    def expression(self, kind: str, depth: int) -> str:
        if depth == 0 or self.rng.random() < 0.1:
            return self.leaf(kind)
        if kind in VECTORS:
            return self.vector_expression(kind, depth - 1)
        if kind in ("f16", "bf16"):
            return self.half_expression(kind, depth - 1)
        return (self.float_expression if kind in FLOATS else self.integer_expression)(kind, depth - 1)

    def memory_index(self, count: int) -> str:
        return f"{self.expression('u32', 1)} & {count - 1}"

    def vector_expression(self, kind: str, depth: int) -> str:
        element, count = VECTORS[kind]
        a, b = self.expression(kind, depth), self.expression(kind, depth)
        form = self.rng.randrange(6)
        if form == 0:
            return f"(({kind}){{{', '.join(self.expression(element, depth) for _ in range(count))}}})"
        if form == 1:
            order = ", ".join(str(self.rng.randrange(2 * count)) for _ in range(count))
            return f"__builtin_shufflevector({a}, {b}, {order})"
        if form == 2 and count == 4:
            other = self.pick("u32x4", "u8x4") if element in INTEGERS else "u8x4"
            return f"__builtin_convertvector({self.expression(other, depth)}, {kind})"
        if form == 3 and kind == "f32x4":
            return f"VECTOR({self.memory_index(2)})"
        if element in INTEGERS:
            if form == 4:
                saturating = ("add_sat", "sub_sat") if INTEGERS[element] < 64 else ()
                return f"__builtin_elementwise_{self.pick('min', 'max', *saturating)}({a}, {b})"
            if form == 5:
                unsigned = element.replace("i", "u")
                amount = f"__builtin_convertvector({b}, vec<{unsigned}, {count}>) & ({unsigned}){INTEGERS[element] - 1}"
                shifted = f"(__builtin_convertvector({a}, vec<{unsigned}, {count}>) {self.pick('<<', '>>')} ({amount}))"
                return f"__builtin_convertvector({shifted}, {kind})"
            wide = f"vec<{element.replace('i', 'u')}, {count}>"
            operation = (
                f"__builtin_convertvector({a}, {wide}) {self.pick(*'+-*&|^')} __builtin_convertvector({b}, {wide})"
            )
            return f"__builtin_convertvector({operation}, {kind})"
        return f"({a} {self.pick('+', '-', '*')} {b})"

    def element(self, kind: str, depth: int) -> str | None:
        """An element of a vector at an index that is known only at run time."""
        fitting = [name for name, (element, _) in VECTORS.items() if element == kind and self.variables[name]]
        if not fitting:
            return None
        vector = self.rng.choice(fitting)
        return f"{self.leaf(vector)}[{self.expression('u32', depth)} & {VECTORS[vector][1] - 1}]"

    def half_expression(self, kind: str, depth: int) -> str:
        a, b = self.expression(kind, depth), self.expression(kind, depth)
        form = self.rng.randrange(8)
        if form < 3:
            return f"({kind})({a} {self.pick('+', '-', '*')} {b})"
        if form == 3 and kind == "f16":
            return f"(f16)({a} / {b})"
        if form == 4:
            return f"({self.condition(depth)} ? {a} : {b})"
        if form == 5:
            return f"({kind})hidden({self.expression('f32', depth)})"
        if form == 6 and kind == "f16":
            return f"(f16)hidden({self.expression(self.pick('i16', 'u16', 'i32', 'f64'), depth)})"
        return self.element(kind, depth) or f"({kind})(-({a}))"

    def float_expression(self, kind: str, depth: int) -> str:
        a, b = self.expression(kind, depth), self.expression(kind, depth)
        suffix = "f" if kind == "f32" else ""
        form = self.rng.randrange(13)
        if form < 3:
            return f"({a} {self.pick('+', '-', '*')} {b})"
        if form == 3:
            return f"({a} / {b})"
        if form == 4:
            return f"({self.condition(depth)} ? {a} : {b})"
        if form == 5:
            other = self.pick("f64", "f16", "bf16") if kind == "f32" else self.pick("f32", "f16")
            return f"({kind})({self.expression(other, depth)})"
        if form == 6:
            return f"({kind})({self.expression(self.pick(*INTEGERS), depth)})"
        if form == 7:
            return f"__builtin_{self.pick('fabs', 'trunc', 'floor', 'ceil', 'rint', 'round')}{suffix}({a})"
        if form == 8:
            return f"__builtin_fma{suffix}({a}, {b}, {self.expression(kind, depth)})"
        if form == 9:
            return f"__builtin_sqrt{suffix}(__builtin_fabs{suffix}({a}))"
        if form == 10:
            return f"__builtin_ldexp{suffix}({a}, (i32)({self.expression('u32', depth)} & 255) - 128)"
        if form == 11:
            return self.element(kind, depth) or f"with_sign({a}, {b})"
        return f"(-({a}))"

    def integer_expression(self, kind: str, depth: int) -> str:
        a, b = self.expression(kind, depth), self.expression(kind, depth)
        bits = INTEGERS[kind]
        unsigned = "u64" if bits == 64 else "u32"
        mask = bits - 1
        form = self.rng.randrange(19)
        if form < 4:
            return f"({kind})(({unsigned}){a} {self.pick('+', '-', '*', '&', '|', '^')} ({unsigned}){b})"
        if form == 4:
            return f"({kind})(({unsigned}){a} << ({self.expression('u32', depth)} & {mask}))"
        if form == 5:
            return f"({kind})({a} >> ({self.expression('u32', depth)} & {mask}))"
        if form == 6:
            if kind in ("i32", "i64"):
                return f"{self.pick('divide', 'modulo')}({a}, {b})"
            return f"({kind}){self.pick('quotient', 'rest')}(({unsigned}){a}, ({unsigned}){b})"
        if form == 7:
            return f"({self.condition(depth)} ? {a} : {b})"
        if form == 8:
            return f"({kind})({self.expression(self.pick(*INTEGERS), depth)})"
        if form == 9:
            conversion = self.pick("to_i32", "to_u32", "to_i64", "to_u64", "to_i16")
            source = {"to_i64": "f64", "to_u64": "f64", "to_i16": "f16"}.get(conversion, "f32")
            return f"({kind}){conversion}({self.expression(source, depth)})"
        if form == 10:
            return f"({kind})bits({self.expression(self.pick(*FLOATS), depth)})"
        if form == 11:
            x = self.expression("u32", depth)
            count = self.pick(f"popcount({x})", f"clz({x} | 1u)", f"ctz({x} | 8u)")
            return f"({kind})__builtin_{count}"
        if form == 12:
            x, wide = self.expression(unsigned, depth), bits if bits == 64 else 32
            turned = self.pick(f"bitreverse{wide}({x})", f"bswap{wide}({x})",
                               f"rotateleft{wide}({x}, {self.expression(unsigned, depth)})")  # fmt: skip
            return f"({kind})__builtin_{turned}"
        if form == 13:
            left, right = (f"hidden({x})" if bits == 64 else x for x in (a, b))
            return f"__builtin_elementwise_{self.pick('min', 'max', 'add_sat', 'sub_sat')}({left}, {right})"
        if form == 14 and bits == 64:
            return f"high({a}, {b})"
        if form == 15:
            return self.element(kind, depth) or f"({kind})(~({a}))"
        if form == 16:
            memory = {"u64": f"WIDE({self.memory_index(4)})", "u8": f"BYTE({self.memory_index(8)})"}
            return memory.get(kind, f"({kind})WORD({self.memory_index(8)})")
        if form == 17:
            return f"({kind})g[{self.memory_index(8)}]"
        return f"({kind})(~({a}))"

    def condition(self, depth: int) -> str:
        kind = self.scalar()
        a, b = self.expression(kind, depth), self.expression(kind, depth)
        test = f"({a} {self.pick('<', '<=', '==', '!=', '>', '>=')} {b})"
        if depth and self.rng.random() < 0.2:
            return f"({test} {self.pick('&&', '||')} {self.condition(depth - 1)})"
        return test

    def declare(self, indent: str, depth: int = 3) -> None:
        kind = self.rng.choices(TYPES, WEIGHTS)[0]
        name = f"x{self.count}"
        self.count += 1
        self.lines.append(f"{indent}{kind} {name} = {self.expression(kind, 2 if kind in VECTORS else depth)};")
        self.variables[kind].append(name)

    def assign_hidden(self, indent: str) -> None:
        """Assign a value that the optimiser cannot move."""
        kind = self.rng.choice([kind for kind in ("u32", "i32", "f32", "u64", "i64", "f64") if self.variables[kind]])
        self.lines.append(f"{indent}{self.rng.choice(self.variables[kind])} = hidden({self.expression(kind, 2)});")

    def assign(self, indent: str) -> None:
        kind = self.rng.choice([kind for kind in TYPES if self.variables[kind]])
        name = self.rng.choice(self.variables[kind])
        if kind in VECTORS and self.rng.random() < 0.5:
            element, count = VECTORS[kind]
            self.lines.append(f"{indent}{name}[{self.memory_index(count)}] = {self.expression(element, 2)};")
        else:
            self.lines.append(f"{indent}{name} = {self.expression(kind, 1 if kind in VECTORS else 2)};")

    def store(self) -> None:
        """Write to a private table, to LDS or to global memory, plainly or atomically."""
        place, count, kind = self.rng.choice(
            (("table[{}]", 8, "u32"), ("WORD({})", 8, "u32"), ("WIDE({})", 4, "u64"), ("BYTE({})", 8, "u8"),
             ("VECTOR({})", 2, "f32x4"), ("g[{}]", 8, "u32"))
        )  # fmt: skip
        target = place.format(self.memory_index(count))
        if place in ("WORD({})", "WIDE({})", "g[{}]") and self.rng.random() < 0.5:
            operation = self.pick("add", "sub", "and", "or", "xor")
            name = f"x{self.count}"
            self.count += 1
            value = self.expression(kind, 2)
            self.lines.append(f"  {kind} {name} = ATOMIC(fetch_{operation}, &{target}, {value});")
            self.variables[kind].append(name)
        else:
            self.lines.append(f"  {target} = {self.expression(kind, 1 if kind in VECTORS else 2)};")

    def loop(self) -> None:
        index = f"n{self.count}"
        self.count += 1
        self.lines.append(f"  for (u32 {index} = 0; {index} < ({self.expression('u32', 1)} & 5); ++{index}) {{")
        self.assign("    ")
        leave = self.rng.randrange(3)
        if leave:
            self.lines.append(f"    if {self.condition(1)} {'break' if leave == 1 else 'continue'};")
        if self.rng.random() < 0.4:
            self.lines.append(f"    for (u32 inner = {index}; inner < 4; ++inner) {{")
            self.assign("      ")
            self.lines.append("    }")
        self.lines.append(f"    table[{index} & 7] ^= {self.expression('u32', 1)};")
        self.lines.append("  }")

    def statement(self) -> None:
        form = self.rng.randrange(11)
        if form < 4:
            self.declare("  ")
        elif form == 4:
            self.lines.append(f"  if {self.condition(1)} {{")
            self.assign("    ")
            self.assign("    ")
            self.lines.append("  } else {")
            self.assign("    ")
            self.lines.append("  }")
        elif form == 5:
            self.loop()
        elif form < 8:
            self.store()
        elif form == 8:
            self.lines.append(f"  switch ({self.expression('u32', 1)} & 7) {{")
            for case in range(self.rng.randrange(3, 8)):
                self.lines.append(f"    case {case}:")
                self.assign_hidden("      ")
                self.lines.append("      break;" if case != 1 else "      // and on")
            self.lines.append("    default: break;\n  }")
        else:
            self.call()

    def call(self) -> None:
        """A function that is not inlined, with arguments of any types, perhaps one that calls itself."""
        inner = Writer(f"{self.name}_f{len(self.helpers)}", self.rng.getrandbits(32))
        kinds = [*self.rng.choices(TYPES, k=self.rng.randrange(1, 5)), "u32", "f32"]
        for i, kind in enumerate(kinds):
            inner.variables[kind].append(f"a{i}")
        result = self.rng.choice(SCALARS)
        parameters = ", ".join(f"{kind} a{i}" for i, kind in enumerate(kinds))
        body = f"return {inner.expression(result, 3)};"
        if self.rng.random() < 0.3:
            again = ", ".join(f"a{i}" for i in range(len(kinds)))
            call = f"(u32)bits({inner.name}(depth + 1, g, {again}))"
            body = f"if (depth < 3 && {inner.condition(1)}) a{len(kinds) - 2} += {call}; {body}"
        self.helpers.append(
            f"HD __attribute__((noinline)) static {result} {inner.name}(u32 depth, u32* g, {parameters}) {{ {body} }}"
        )
        name = f"x{self.count}"
        self.count += 1
        arguments = ", ".join(self.expression(kind, 1) for kind in kinds)
        self.lines.append(f"  {result} {name} = {inner.name}(0, g, {arguments});")
        self.variables[result].append(name)

    def function(self, statements: int = 18) -> str:
        """The C++ text: helper functions and `u32 NAME(u32 w0, u32 w1, u32 w2, u32 w3, u32* g)`; g has eight words."""
        for kind, names in STARTING.items():
            self.variables[kind] += names
        for _ in range(statements):
            self.statement()
        self.lines.append("  u32 h = 1;")
        for kind, names in self.variables.items():
            for name in names:
                if kind in VECTORS:
                    element, count = VECTORS[kind]
                    self.lines.append(f"  h = mix_all<{element}, {count}>(h, {name});")
                else:
                    self.lines.append(f"  h = mix64(h, (u64)bits({name}));")
        body = "\n".join(self.lines)
        head = f"HD static u32 {self.name}(u32 w0, u32 w1, u32 w2, u32 w3, u32* g) {{"
        return "\n".join([*self.helpers, f"{head}\n{START}{body}\n{END}}}"])


def functions(seed: int, count: int) -> list[tuple[str, str]]:
    """(name, text) of `count` random functions."""
    return [(name, Writer(name, seed * 1000 + i).function()) for i in range(count) for name in [f"p{seed}_{i}"]]


def device_source(programs: list[tuple[str, str]]) -> str:
    """HIP text with a kernel NAME_kernel(const u32 in[][4], u32 g[][8], u32* out) per function, an item per call."""
    parts = [DEVICE]
    for name, text in programs:
        parts.append(text)
        parts.append(
            f'extern "C" __attribute__((global, amdgpu_flat_work_group_size(64, 64)))\n'
            f"void {name}_kernel(const u32* in, u32* g, u32* out) {{\n"
            "  u32 t = __builtin_amdgcn_workgroup_id_x() * 64 + __builtin_amdgcn_workitem_id_x();\n"
            f"  out[t] = {name}(in[4 * t], in[4 * t + 1], in[4 * t + 2], in[4 * t + 3], g + 8 * t);\n}}"
        )
    return "\n".join(parts)


def host_source(programs: list[tuple[str, str]]) -> str:
    """C++ text with `void NAME_host(const u32* in, u32* g, u32* out, u32 n)` per function."""
    parts = [HOST]
    for name, text in programs:
        parts.append(text)
        parts.append(
            f'extern "C" void {name}_host(const u32* in, u32* g, u32* out, u32 n) {{\n'
            "  for (u32 t = 0; t < n; ++t, in += 4, g += 8)\n"
            f"    out[t] = {name}(in[0], in[1], in[2], in[3], g);\n}}"
        )
    return "\n".join(parts)
