// SPDX-License-Identifier: GPL-2.0
/*
 * A consumer that destroys its PD some time after it was told that the device
 * is removed, as RDS does (rds_ib_dev_free()).
 */
#include <linux/module.h>
#include <linux/workqueue.h>
#include <rdma/ib_verbs.h>

static char *device;
module_param(device, charp, 0444);
MODULE_PARM_DESC(device, "name of the device in which it has a PD");

static bool hold;
module_param(hold, bool, 0644);
MODULE_PARM_DESC(hold, "whether the PD lives longer until this is 0");

/* The milliseconds by which the PD lives longer, and between looks at hold. */
#define DELAY_MS	500

static struct ib_pd *pd;

static void destroy_pd(struct work_struct *work)
{
	if (READ_ONCE(hold)) {
		schedule_delayed_work(to_delayed_work(work),
				      msecs_to_jiffies(DELAY_MS));
		return;
	}
	/* Before the PD is gone: whoever waits for that finds this in the log. */
	pr_info("late_pd: destroys the PD\n");
	ib_dealloc_pd(pd);
	pd = NULL;
}

static DECLARE_DELAYED_WORK(destroy, destroy_pd);

static int late_pd_add(struct ib_device *dev)
{
	struct ib_pd *new;

	if (pd || !device || strcmp(dev_name(&dev->dev), device))
		return -EOPNOTSUPP;
	new = ib_alloc_pd(dev, 0);
	if (IS_ERR(new))
		return PTR_ERR(new);
	pd = new;
	return 0;
}

static void late_pd_remove(struct ib_device *dev, void *data)
{
	schedule_delayed_work(&destroy, msecs_to_jiffies(DELAY_MS));
}

static struct ib_client client = {
	.name = "late_pd",
	.add = late_pd_add,
	.remove = late_pd_remove,
};

static int __init late_pd_init(void)
{
	return ib_register_client(&client);
}

static void __exit late_pd_exit(void)
{
	ib_unregister_client(&client);
	flush_delayed_work(&destroy);
}

module_init(late_pd_init);
module_exit(late_pd_exit);
MODULE_DESCRIPTION("A PD that lives longer than its device, for a test");
MODULE_LICENSE("GPL");
