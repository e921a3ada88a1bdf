"""The tuner of decode attention over an int4 cache: waves of a work-group and splits, for each problem size.

By default B 1 to 128 x keys 256 to 131072 x 1 x 1, 1 x 8 and 2 x 8 heads at D = 128, for any page size.

Candidates are ranked as those of the fp8 cache are. Rows are counted with four scales per row and apply to any number
of them: instructions and loaded bytes do not depend on it.
"""

from __future__ import annotations

from hipforge.ops.decode_attention.int4.family import FAMILY
from hipforge.ops.decode_attention.kernels import ANY_PAGE_SIZE
from hipforge.tuning.families.decode_attention import BATCHES, KEYS, cells, tuner_of

OPTIONS = ("attention",)

# Rounding K, V, the weights and the output to bfloat16 gives 1.7e-3 each, 3.4e-3 together; a key left out of 4096 with
# equal weights, the least that goes wrong, 1.6e-2.
MAX_ERROR = 5e-3
NUM_GROUPS = 4
HEADS = ((1, 1), (1, 8), (2, 8))

TUNER = tuner_of(FAMILY, MAX_ERROR, cells((ANY_PAGE_SIZE,), HEADS, KEYS, BATCHES, num_groups=NUM_GROUPS))
