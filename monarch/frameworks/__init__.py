"""What a trainer imports: checkpoints beside the training, in any framework."""
