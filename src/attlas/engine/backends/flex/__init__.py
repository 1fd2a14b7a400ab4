"""torch's FlexAttention: masks and scores as functions of one pair, compiled into one kernel off the CPU."""

from attlas.engine.backends.flex.backend import Flex

BACKENDS = (Flex(),)
