"""A simulated vLLM: a test instrument in virtual time and over HTTP; nothing measured on it is a result about vLLM."""
