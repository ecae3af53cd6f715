"""From text files to batches: read → recognise → render → tokenise → pack."""
