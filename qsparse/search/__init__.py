"""A run in, its Pareto set out: plan.py says what a model may be made of, study.py looks for the best with Optuna."""
