# SPDX-License-Identifier: Apache-2.0
"""The rows of a layer that are checked for NaN and infinity, and their names in errors."""

# The checked values, in the order in which forward and backward compute them. STAGES has the name
# and the remedy of each for the error.
INPUT, LOGITS, EXPERT, SHARED, OUTPUT, D_OUTPUT, D_EXPERT, D_INPUT = range(8)
STAGES = (
    ("the input row", "look at the layers before this one"),
    ("the row of router logits", "look at the weights of the router"),
    ("the row that the expert returned", "look at the weights of the expert, and for overflow"),
    ("the row of the shared expert", "look at the weights of the shared expert"),
    ("the sum of the experts' rows", "look for overflow of the dtype of the rows"),
    ("the gradient of the output row", "look at the loss and at the layers after this one"),
    ("the gradient that the expert returned", "look at the weights of the expert"),
    ("the gradient of the input row", "look at the weights of the router and the shared expert"),
)
