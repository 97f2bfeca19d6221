"""From a tokenized request to the worker that serves it: a bounded queue, the choice of a worker, streams back."""
