/* The launch that does nothing, for measuring what a call costs before it. Preloaded, it comes before the runtime's own
 * functions of these names; see bench_hook.py. Arguments are not read, so none are declared. */
int hipLaunchKernel(void) { return 0; }
int hipExtLaunchKernel(void) { return 0; }
int hipModuleLaunchKernel(void) { return 0; }
int hipLaunchCooperativeKernel(void) { return 0; }
