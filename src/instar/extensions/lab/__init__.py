"""Short trainings that answer questions: what growth saves, which schedule is best, a learning rate, a micro-batch"""
