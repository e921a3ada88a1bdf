"""Quantised models in the transformers library, with hipforge's layers.

Two ways. Importing this package registers the quantiser of MX-FP8, which ``from_pretrained`` finds, also for a
checkpoint that ``save_pretrained`` wrote; without the import the library warns of an unknown quantisation and refuses
the shapes of that checkpoint's weights::

    from hipforge.integrations.transformers import MXFP8Config

    model = AutoModelForCausalLM.from_pretrained("checkpoint/", quantization_config=MXFP8Config())

And :func:`register` takes published checkpoints by what their ``quantization_config`` declares: ``fp8`` with blocks or
one scale per tensor, fp8 of compressed-tensors and Quark, gpt-oss's ``mxfp4``::

    hipforge.integrations.transformers.register()
    model = AutoModelForCausalLM.from_pretrained("deepseek-ai/DeepSeek-V3")
"""

from hipforge.integrations.transformers.mxfp8 import MXFP8Config as MXFP8Config
from hipforge.integrations.transformers.published import PublishedConfig as PublishedConfig
from hipforge.integrations.transformers.published import register as register

__all__ = ["MXFP8Config", "PublishedConfig", "register"]
