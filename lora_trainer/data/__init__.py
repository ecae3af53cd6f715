"""From a folder to batches: walk -> check -> captions -> buckets -> cache -> batches."""
