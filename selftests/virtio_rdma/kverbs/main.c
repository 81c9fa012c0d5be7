// SPDX-License-Identifier: GPL-2.0
/*
 * Tests of the verbs that consumers in the kernel use, on one device in
 * loopback. KUnit runs them when the module is loaded, with kunit.enable=1
 * kunit.autorun=1 on the kernel's command line.
 */
#include <linux/module.h>

#include "kverbs.h"

static char *device;
module_param(device, charp, 0400);
MODULE_PARM_DESC(device, "name of the device under test");

unsigned int kv_rounds = 200;
module_param_named(rounds, kv_rounds, uint, 0400);
MODULE_PARM_DESC(rounds, "number of messages of a test that sends many");

static struct ib_device *found;

/* Takes a reference to the device, so that it stays until the suite ends. */
static int client_add(struct ib_device *dev)
{
	if (!device || strcmp(dev_name(&dev->dev), device) || !ib_device_try_get(dev))
		return -EOPNOTSUPP;
	found = dev;
	return 0;
}

static struct ib_client client = {
	.name = "kverbs",
	.add = client_add,
};

static int suite_init(struct kunit_suite *suite)
{
	int ret = ib_register_client(&client);

	if (ret)
		return ret;
	if (found)
		return 0;
	ib_unregister_client(&client);
	return -ENODEV;
}

static void suite_exit(struct kunit_suite *suite)
{
	ib_device_put(found);
	found = NULL;
	ib_unregister_client(&client);
}

static int init(struct kunit *test)
{
	return kv_init(test, found);
}

#define KV_SUITE(kind) {				\
	.name = "kverbs_" #kind,			\
	.suite_init = suite_init,			\
	.suite_exit = suite_exit,			\
	.init = init,					\
	.test_cases = kv_##kind##_cases,		\
}

static struct kunit_suite contexts = KV_SUITE(context);
static struct kunit_suite data = KV_SUITE(data);
static struct kunit_suite memory = KV_SUITE(memory);
static struct kunit_suite states = KV_SUITE(state);
static struct kunit_suite srqs = KV_SUITE(srq);

kunit_test_suites(&contexts, &data, &memory, &states, &srqs);

MODULE_DESCRIPTION("Tests of verbs in the kernel");
MODULE_LICENSE("GPL");
