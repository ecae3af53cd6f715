"""What a run leaves: files written, proved and described."""
