"""The bookkeeping of open steps: batch index, dispatch, rounds, metrics."""
