"""A pytest plugin: the operators that torchvision looks for when it is imported, without kernels.

The index has torchvision for CUDA alone, whose library does not load beside a CPU build of torch. Servers import
torchvision and call none of its operators here.
"""

import torch

OPERATORS = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    OPERATORS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
