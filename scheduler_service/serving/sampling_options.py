"""What requests mean that leave numbers of their sampling unset, and which of them a beam search turns off."""

from pagewire.common.messages import SamplingParams

# Of a random choice: a beam search makes none, and takes the values that turn them off.
FILTERS = ("temperature", "top_k", "top_p", "min_p")
FILTERS_OFF = {name: getattr(SamplingParams(), name) for name in FILTERS}
# generation_config.json may say what requests mean that leave these unset. Where it says nothing, the API's hold.
CHECKPOINTS_OPTIONS = (*FILTERS, "repetition_penalty")
API_DEFAULTS = SamplingParams(temperature=1.0)
# Of tokens that a checkpoint suppresses, whatever bias a request gives them: far below any logit, and yet finite, so
# that a grammar which allows nothing else still has its way.
SUPPRESSING_BIAS = -1e30
