"""Lightning callbacks: checkpoints, averaged weights, progress, speed, stragglers, pictures."""
