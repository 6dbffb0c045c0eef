"""From a model to its hidden dimensions: trace, track axes, survey. `register_op` adds a rule for a custom op."""

from ispasp.graph.ops import Form, Op, Operand
from ispasp.graph.rules import elementwise, linear_like, register_op, unregister_op
from ispasp.graph.track import Tracker, Value

__all__ = ["Form", "Op", "Operand", "Tracker", "Value", "elementwise", "linear_like", "register_op", "unregister_op"]
