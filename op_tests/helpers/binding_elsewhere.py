"""Run by a Python that has none of our dependencies: load the binding, bind an entry, choose a variant, be refused.

Arguments: the binding, and the module of the C ABI's tests.
"""

import ctypes
import importlib.machinery
import importlib.util
import sys


class Tensor:
    """Stands in for torch's type: a vector of doubles."""

    def __init__(self, count):
        self.values = (ctypes.c_double * count)()


class Refused(Exception):
    pass


def nothing(*_):
    return 0


def read_tensor(tensor):
    return ctypes.addressof(tensor.values), 10, 0, 0, (len(tensor.values),), (1,)


binding, library = sys.argv[1], ctypes.CDLL(sys.argv[2])
loader = importlib.machinery.ExtensionFileLoader("hipforge_binding", binding)
module = importlib.util.module_from_spec(importlib.machinery.ModuleSpec("hipforge_binding", loader, origin=binding))
loader.exec_module(module)

errors = (Refused, Refused, Refused, Refused, Refused)
checks = (lambda tensor: None, nothing, None, nothing, nothing, lambda: False, nothing, nothing, type)
binder = module.make_binder(0, Tensor, type, errors, nothing, read_tensor, nothing, None, (0,) * 8, checks, None)
address = ctypes.cast(library.hf_entry_scalars, ctypes.c_void_p).value
names = ("out", "maybe", "i", "d", "b", "s")
scalars = binder.bind(address, "scalars", "Ttidbs", names, bytes(6), (0.5, True, "abc"), None, library)

out = Tensor(6)
scalars(out, None, -3, s="grüße", b=False)
assert list(out.values)[:5] == [0, -3, 0.5, 0, 7], list(out.values)

loaded = []


def load(arguments):
    loaded.append(arguments[2])
    return scalars


entries = {}
choose = binder.dispatch("chosen", names, (), lambda out, maybe, i, d, b, s: {"SIZE": i % 2}, entries, load)
for i in (4, 5):
    choose(out, None, i, 1.0, True, "x")
entries[0] = scalars
choose(out, None, 6, 1.0, True, "x")
assert loaded == [4, 5] and out.values[1] == 6, (loaded, out.values[1])

for wrong, words in (((out, None, "8"), "'i' must be an int; got str"), ((1, None, 8), "'out' must be a torch.Tensor")):
    try:
        scalars(*wrong)
    except Refused as error:
        assert words in str(error), error
    else:
        raise AssertionError(wrong)
