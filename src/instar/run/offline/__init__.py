"""Checkpoints without a run that trains: grown, averaged, analysed, loaded as models"""
