"""Measuring words: passes, caches, agreement, errors, time and memory."""

# How far one rounding moves a number; here, apart from what measures, so that reading rows takes no torch.
# Half the distance from 1 to the next number: the relative error of one rounding (Higham, 2002, section 2.1).
UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
