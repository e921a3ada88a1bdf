"""Fixtures of the JIT's tests: the stand-in toolchain, and the module of the C ABI's tests."""

from helpers.abi_module import bound as bound
from helpers.abi_module import implementation as implementation
from helpers.abi_module import library as library
from helpers.jit_stand_in import stand_in as stand_in
