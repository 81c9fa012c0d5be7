// SPDX-License-Identifier: GPL-2.0
/*
 * Delays the return of a function of the driver that polls a CQ, if it has
 * found completions. Meanwhile a test can do something that the caller of the
 * function does not expect before it handles these completions.
 */
#include <linux/delay.h>
#include <linux/kprobes.h>
#include <linux/module.h>
#include <linux/ptrace.h>

static char *symbol;
module_param(symbol, charp, 0444);
MODULE_PARM_DESC(symbol, "the function that polls");

static unsigned int delay_ms = 300;
module_param(delay_ms, uint, 0444);
MODULE_PARM_DESC(delay_ms, "milliseconds by which it returns late");

static int wait_before_return(struct kretprobe_instance *instance,
			      struct pt_regs *regs)
{
	if ((int)regs_return_value(regs) > 0)
		mdelay(delay_ms);
	return 0;
}

static struct kretprobe probe = {
	.handler = wait_before_return,
};

static int __init slow_poll_init(void)
{
	probe.kp.symbol_name = symbol;
	return register_kretprobe(&probe);
}

static void __exit slow_poll_exit(void)
{
	unregister_kretprobe(&probe);
}

module_init(slow_poll_init);
module_exit(slow_poll_exit);
MODULE_DESCRIPTION("Late return from polling, for a test");
MODULE_LICENSE("GPL");
