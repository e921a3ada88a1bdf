"""Random C++ functions without undefined behaviour, which give the same bits on every machine and optimisation level.

Each is a function of four words and a private table. Integers wrap because they are unsigned where it matters, shifts
are masked, divisors are odd, indices are masked, float-to-integer conversions are guarded, and NaNs are made canonical
where their bits become visible. The operands of unsigned divisions are hidden from the optimiser: clang 22 at -O0
divides sign-extended bytes as if they were 7-bit numbers (AMDGPU's 24-bit division), which is the compiler's mistake.
"""

from __future__ import annotations

import random

PRELUDE = """
typedef unsigned char u8; typedef unsigned short u16; typedef unsigned u32; typedef unsigned long long u64;
typedef int i32; typedef long long i64; typedef short i16; typedef signed char i8;
HD static inline u32 bits32(float x) { return x != x ? 0x7FC00000u : __builtin_bit_cast(u32, x); }
HD static inline u64 bits64(double x) { return x != x ? 0x7FF8000000000000ull : __builtin_bit_cast(u64, x); }
HD static inline float from32(u32 x) { return __builtin_bit_cast(float, x); }
HD static inline double from64(u64 x) { return __builtin_bit_cast(double, x); }
HD static inline i32 to_i32(float x) { return x > -2e9f && x < 2e9f ? (i32)x : 7; }
HD static inline u32 to_u32(float x) { return x >= 0.0f && x < 4e9f ? (u32)x : 9u; }
HD static inline i64 to_i64(double x) { return x > -9e18 && x < 9e18 ? (i64)x : 11; }
template <class T> HD static inline T hidden(T x) { asm volatile("" : REGISTER(x)); return x; }
template <class T> HD static inline T quotient(T a, T b) { return hidden(a) / (hidden(b) | 1); }
template <class T> HD static inline T rest(T a, T b) { return hidden(a) % (hidden(b) | 1); }
HD static inline i32 divide(i32 a, i32 b) { return a == (i32)0x80000000 && b == -1 ? 3 : a / (b | 1); }
HD static inline i32 modulo(i32 a, i32 b) { return (b | 1) == -1 ? 5 : a % (b | 1); }
HD static inline u32 mix(u32 h, u32 x) { h ^= x; h *= 0x9E3779B1u; return h ^ h >> 15; }
HD static inline u32 mix64(u32 h, u64 x) { return mix(mix(h, (u32)x), (u32)(x >> 32)); }
"""

TYPES = ("u32", "i32", "u64", "i64", "f32", "f64", "u16", "i8")
C_NAME = {"f32": "float", "f64": "double"}


class Writer:
    """Writes one function from a seed."""

    def __init__(self, name: str, seed: int) -> None:
        self.name = name
        self.rng = random.Random(seed)
        self.variables: dict[str, list[str]] = {kind: [] for kind in TYPES}
        self.lines: list[str] = []
        self.count = 0
        self.helpers: list[str] = []

    def pick(self, *options: str) -> str:
        return self.rng.choice(options)

    def constant(self, kind: str) -> str:
        rng = self.rng
        if kind == "f32":
            return self.pick(
                "0.5f", "-1.25f", "3.0f", "1e20f", "1e-30f", "-0.0f", f"{rng.uniform(-100, 100):.6g}f + 0.0f"
            )
        if kind == "f64":
            return self.pick("0.5", "-1.25", "3.0", "1e200", "1e-300", f"({rng.uniform(-100, 100)!r})")
        if kind in ("u64", "i64"):
            return f"({kind}){rng.getrandbits(rng.choice((4, 20, 40, 63)))}ull"
        return f"({kind}){rng.getrandbits(rng.choice((3, 8, 16, 31)))}u"

    def leaf(self, kind: str) -> str:
        known = self.variables[kind]
        return self.rng.choice(known) if known and self.rng.random() < 0.8 else self.constant(kind)

    def expression(self, kind: str, depth: int) -> str:
        if depth == 0 or self.rng.random() < 0.1:
            return self.leaf(kind)
        make = {"f32": self.float_expression, "f64": self.float_expression}.get(kind, self.integer_expression)
        return make(kind, depth - 1)

    def float_expression(self, kind: str, depth: int) -> str:
        a, b = self.expression(kind, depth), self.expression(kind, depth)
        other = "f64" if kind == "f32" else "f32"
        suffix = "f" if kind == "f32" else ""
        form = self.rng.randrange(9)
        if form < 3:
            return f"({a} {self.pick('+', '-', '*')} {b})"
        if form == 3:
            return f"({a} / {b})"
        if form == 4:
            return f"({self.condition(depth)} ? {a} : {b})"
        if form == 5:
            return f"({C_NAME[kind]})({self.expression(other, depth)})"
        if form == 6:
            return f"({C_NAME[kind]})({self.expression(self.pick('i32', 'u32', 'i64', 'u64', 'u16', 'i8'), depth)})"
        if form == 7:
            return f"__builtin_{self.pick('fabs', 'trunc', 'floor', 'ceil', 'rint')}{suffix}({a})"
        return f"(-({a}))"

    def integer_expression(self, kind: str, depth: int) -> str:
        a, b = self.expression(kind, depth), self.expression(kind, depth)
        wide = kind in ("u64", "i64")
        unsigned = "u64" if wide else "u32"
        mask = 63 if wide else 31 if kind in ("u32", "i32") else 7
        form = self.rng.randrange(13)
        if form < 4:
            return f"({kind})(({unsigned}){a} {self.pick('+', '-', '*', '&', '|', '^')} ({unsigned}){b})"
        if form == 4:
            return f"({kind})(({unsigned}){a} << ({self.expression('u32', depth)} & {mask}))"
        if form == 5:
            return f"({kind})({a} >> ({self.expression('u32', depth)} & {mask}))"
        if form == 6:
            if kind == "i32":
                return f"{self.pick('divide', 'modulo')}({a}, {b})"
            return f"({kind}){self.pick('quotient', 'rest')}(({unsigned}){a}, ({unsigned}){b})"
        if form == 7:
            return f"({self.condition(depth)} ? {a} : {b})"
        if form == 8:
            return f"({kind})({self.expression(self.pick('u32', 'i32', 'u64', 'i64', 'u16', 'i8'), depth)})"
        if form == 9:
            conversion = self.pick("to_i32", "to_u32", "to_i64")
            return f"({kind}){conversion}({self.expression('f64' if conversion == 'to_i64' else 'f32', depth)})"
        if form == 10:
            if self.rng.random() < 0.5:
                return f"({kind})bits32({self.expression('f32', depth)})"
            return f"({kind})bits64({self.expression('f64', depth)})"
        if form == 11:
            x = self.expression("u32", depth)
            count = self.pick(f"popcount({x})", f"clz({x} | 1u)", f"ctz({x} | 8u)")
            return f"({kind})__builtin_{count}"
        return f"({kind})(~({a}))"

    def condition(self, depth: int) -> str:
        kind = self.rng.choice(TYPES)
        a, b = self.expression(kind, depth), self.expression(kind, depth)
        return f"({a} {self.pick('<', '<=', '==', '!=', '>', '>=')} {b})"

    def declare(self, indent: str, depth: int = 3) -> None:
        kind = self.rng.choice(TYPES)
        name = f"v{self.count}"
        self.count += 1
        self.lines.append(f"{indent}{C_NAME.get(kind, kind)} {name} = {self.expression(kind, depth)};")
        self.variables[kind].append(name)

    def assign(self, indent: str) -> None:
        kind = self.rng.choice([kind for kind in TYPES if self.variables[kind]])
        self.lines.append(f"{indent}{self.rng.choice(self.variables[kind])} = {self.expression(kind, 2)};")

    def statement(self) -> None:
        form = self.rng.randrange(8)
        if form < 3:
            self.declare("  ")
        elif form == 3:
            self.lines.append(f"  if {self.condition(1)} {{")
            self.assign("    ")
            self.assign("    ")
            self.lines.append("  } else {")
            self.assign("    ")
            self.lines.append("  }")
        elif form == 4:
            loop = f"n{self.count}"
            self.count += 1
            self.lines.append(f"  for (u32 {loop} = 0; {loop} < ({self.expression('u32', 1)} & 5); ++{loop}) {{")
            self.assign("    ")
            self.lines.append(f"    table[{loop} & 7] ^= {self.expression('u32', 1)};")
            self.lines.append("  }")
        elif form == 5:
            self.lines.append(f"  table[{self.expression('u32', 1)} & 7] = {self.expression('u32', 2)};")
            name = f"v{self.count}"
            self.count += 1
            self.lines.append(f"  u32 {name} = table[{self.expression('u32', 1)} & 7];")
            self.variables["u32"].append(name)
        elif form == 6:
            self.lines.append(f"  switch ({self.expression('u32', 1)} & 3) {{")
            for case in range(3):
                self.lines.append(f"    case {case}:")
                self.assign("      ")
                self.lines.append("      break;" if case != 1 else "      // and on")
            self.lines.append("    default: break;\n  }")
        else:
            self.call()

    def call(self) -> None:
        """A function that is not inlined, with a float and an integer argument."""
        inner = Writer(f"{self.name}_f{len(self.helpers)}", self.rng.getrandbits(32))
        inner.variables["u32"], inner.variables["f32"] = ["a"], ["b"]
        body = inner.expression("u32", 3)
        self.helpers.append(
            f"HD __attribute__((noinline)) static u32 {inner.name}(u32 a, float b) {{ return {body}; }}"
        )
        name = f"v{self.count}"
        self.count += 1
        self.lines.append(f"  u32 {name} = {inner.name}({self.expression('u32', 2)}, {self.expression('f32', 2)});")
        self.variables["u32"].append(name)

    def function(self, statements: int = 14) -> str:
        """The C++ text: helper functions and `u32 NAME(u32 w0, u32 w1, u32 w2, u32 w3)`."""
        for i in range(4):
            self.variables["u32"].append(f"w{i}")
        self.lines += [
            "  u32 table[8];", "  for (u32 i = 0; i < 8; ++i) table[i] = w0 * i + w1;", "  i32 i0 = (i32)w2;",
            "  float f0 = from32(w3), f1 = (float)(i32)w1 * 0.01f;", "  double d0 = from64((u64)w0 << 32 | w1);",
            "  u64 q0 = (u64)w2 << 32 | w3;", "  i64 j0 = (i64)q0;", "  u16 h0 = (u16)w0;", "  i8 b0 = (i8)w3;",
        ]  # fmt: skip
        for kind, names in {"i32": ["i0"], "f32": ["f0", "f1"], "f64": ["d0"], "u64": ["q0"], "i64": ["j0"],
                            "u16": ["h0"], "i8": ["b0"]}.items():  # fmt: skip
            self.variables[kind] += names
        for _ in range(statements):
            self.statement()
        self.lines.append("  u32 h = 1;")
        for kind, names in self.variables.items():
            for name in names:
                if kind == "f32":
                    self.lines.append(f"  h = mix(h, bits32({name}));")
                elif kind == "f64":
                    self.lines.append(f"  h = mix64(h, bits64({name}));")
                else:
                    self.lines.append(f"  h = mix64(h, (u64){name});")
        self.lines.append("  for (u32 i = 0; i < 8; ++i) h = mix(h, table[i]);\n  return h;")
        body = "\n".join(self.lines)
        return "\n".join([*self.helpers, f"HD static u32 {self.name}(u32 w0, u32 w1, u32 w2, u32 w3) {{\n{body}\n}}"])


def functions(seed: int, count: int) -> list[tuple[str, str]]:
    """(name, text) of `count` random functions."""
    return [(name, Writer(name, seed * 1000 + i).function()) for i in range(count) for name in [f"p{seed}_{i}"]]


def device_source(programs: list[tuple[str, str]]) -> str:
    """HIP text with a kernel NAME_kernel(const u32 in[][4], u32* out) per function, one item per function call."""
    parts = ["#define HD __attribute__((device))", '#define REGISTER(x) "+v"(x)', PRELUDE]
    for name, text in programs:
        parts.append(text)
        parts.append(
            f'extern "C" __attribute__((global)) void {name}_kernel(const u32* in, u32* out) {{\n'
            "  u32 t = __builtin_amdgcn_workgroup_id_x() * 64 + __builtin_amdgcn_workitem_id_x();\n"
            f"  out[t] = {name}(in[4 * t], in[4 * t + 1], in[4 * t + 2], in[4 * t + 3]);\n}}"
        )
    return "\n".join(parts)


def host_source(programs: list[tuple[str, str]]) -> str:
    """C++ text with `void NAME_host(const u32* in, u32* out, u32 n)` per function."""
    parts = ["#define HD", '#define REGISTER(x) "+r"(x)', PRELUDE]
    for name, text in programs:
        parts.append(text)
        parts.append(
            f'extern "C" void {name}_host(const u32* in, u32* out, u32 n) {{\n'
            "  for (u32 t = 0; t < n; ++t, in += 4)\n"
            f"    out[t] = {name}(in[0], in[1], in[2], in[3]);\n}}"
        )
    return "\n".join(parts)
