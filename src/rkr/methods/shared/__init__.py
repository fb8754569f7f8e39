"""What several methods share, written once: networks with tasks, penalties, memories, distillation, growth."""
