// SPDX-License-Identifier: GPL-2.0
/*
 * Contains functions for what the kernel's headers offer only to C.
 */
#include <linux/dma-buf.h>
#include <linux/dma-mapping.h>
#include <linux/etherdevice.h>
#include <linux/highmem.h>
#include <linux/if_vlan.h>
#include <linux/iommu.h>
#include <linux/iosys-map.h>
#include <linux/pci.h>
#include <linux/sched/mm.h>
#include <linux/wait_bit.h>
#include <linux/workqueue.h>
#include <net/net_namespace.h>
#include <rdma/ib_addr.h>
#include <rdma/ib_user_ioctl_cmds.h>
#include <rdma/uverbs_ioctl.h>
#include <rdma/virtio_rdma-abi.h>

#define UVERBS_MODULE_NAME virtio_rdma
#include <rdma/uverbs_named_ioctl.h>

#include "virtio_rdma_helpers.h"

MODULE_IMPORT_NS("DMA_BUF");

static_assert(VIRTIO_RDMA_ATTR_QUERY_CONTEXT_RESP == 1U << UVERBS_ID_NS_SHIFT);

#define CONTEXT_RESP \
	UVERBS_ATTR_STRUCT(struct virtio_rdma_uresp_alloc_ucontext, max_inline_data)

ADD_UVERBS_ATTRIBUTES_SIMPLE(virtio_rdma_query_context, UVERBS_OBJECT_DEVICE,
			     UVERBS_METHOD_QUERY_CONTEXT,
			     UVERBS_ATTR_PTR_OUT(VIRTIO_RDMA_ATTR_QUERY_CONTEXT_RESP,
						 CONTEXT_RESP, UA_MANDATORY));

static const struct uapi_definition virtio_rdma_definitions[] = {
	UAPI_DEF_CHAIN_OBJ_TREE(UVERBS_OBJECT_DEVICE,
				&virtio_rdma_query_context),
	{},
};

const struct uapi_definition *virtio_rdma_uapi_definitions(void)
{
	return virtio_rdma_definitions;
}

struct module *virtio_rdma_this_module(void)
{
	return THIS_MODULE;
}

bool virtio_rdma_module_get(void)
{
	return try_module_get(THIS_MODULE);
}

/*
 * The other side is a device, so a kernel for one CPU needs the order too. The
 * barriers between processors are not made for a device that is @behind_bus
 * (VIRTIO_F_ORDER_PLATFORM). It needs those for coherent memory as well, like
 * the device of virtio_wmb(), virtio_rmb() and virtio_mb().
 */
void virtio_rdma_store_release(u32 *word, u32 value, bool behind_bus)
{
	/* A device that sees this value also sees all earlier writes. */
	if (behind_bus)
		dma_wmb();
	/*
	 * Earlier reads are done before the store, which dma_wmb() does not
	 * ensure. What the device writes because of this value, over CQEs that
	 * were read for example, cannot be what they return.
	 */
	virt_store_release(word, value);
}

u32 virtio_rdma_load_acquire(const u32 *word, bool behind_bus)
{
	/* A device that has not written this value yet sees no later write. */
	u32 value = virt_load_acquire(word);

	/* What later reads return is at least as new as this value. */
	if (behind_bus)
		dma_rmb();
	return value;
}

void virtio_rdma_mb(bool behind_bus)
{
	if (!behind_bus) {
		/* Orders an index that was written before a word that is read. */
		virt_mb();
		return;
	}
	/* dma_mb() promises an order of writes, and one of reads, but not this. */
	mb();
}

void virtio_rdma_set_max_seg_size(struct device *dev, unsigned int size)
{
	dma_set_max_seg_size(dev, size);
}

unsigned long virtio_rdma_spin_lock_irqsave(spinlock_t *lock)
{
	unsigned long flags;

	spin_lock_irqsave(lock, flags);
	return flags;
}

bool virtio_rdma_spin_trylock_irqsave(spinlock_t *lock, unsigned long *flags)
{
	unsigned long saved;

	if (!spin_trylock_irqsave(lock, saved))
		return false;
	*flags = saved;
	return true;
}

void virtio_rdma_spin_unlock_irqrestore(spinlock_t *lock, unsigned long flags)
{
	spin_unlock_irqrestore(lock, flags);
}

void virtio_rdma_lockdep_assert_held(spinlock_t *lock)
{
	lockdep_assert_held(lock);
}

void virtio_rdma_reinit_completion(struct completion *completion)
{
	reinit_completion(completion);
}

void virtio_rdma_synchronize_rcu_tasks(void)
{
	synchronize_rcu_tasks();
}

void virtio_rdma_flush_ib_wq(void)
{
	flush_workqueue(ib_wq);
}

unsigned int virtio_rdma_memalloc_noio_save(void)
{
	return memalloc_noio_save();
}

void virtio_rdma_memalloc_noio_restore(unsigned int flags)
{
	memalloc_noio_restore(flags);
}

struct workqueue_struct *virtio_rdma_alloc_workqueue(const char *name,
						     bool freezable)
{
	unsigned int flags = WQ_MEM_RECLAIM | WQ_UNBOUND;

	return alloc_workqueue("%s", flags | (freezable ? WQ_FREEZABLE : 0), 0,
			       name);
}

bool virtio_rdma_has_feature(const struct virtio_device *vdev,
			     unsigned int fbit)
{
	return virtio_has_feature(vdev, fbit);
}

/* Returns the feature bits below 64 that the device offers. */
u64 virtio_rdma_offered_features(struct virtio_device *vdev)
{
	u64 features[VIRTIO_FEATURES_U64S];

	virtio_get_features(vdev, features);
	return features[0];
}

void virtio_rdma_set_feature(struct virtio_device *vdev, unsigned int fbit)
{
	__virtio_set_bit(vdev, fbit);
}

void virtio_rdma_clear_feature(struct virtio_device *vdev, unsigned int fbit)
{
	__virtio_clear_bit(vdev, fbit);
}

int virtio_rdma_find_vqs(struct virtio_device *vdev, unsigned int nvqs,
			 struct virtqueue *vqs[], struct virtqueue_info info[])
{
	return virtio_find_vqs(vdev, nvqs, vqs, info, NULL);
}

void virtio_rdma_del_vqs(struct virtio_device *vdev)
{
	/* Whoever notifies the device of buffers does that as an RCU reader. */
	synchronize_rcu();
	vdev->config->del_vqs(vdev);
}

/*
 * The driver's pointer of a device is not NULL as long as there are queues.
 */
bool virtio_rdma_has_queues(struct virtio_device *vdev)
{
	/* Pairs with virtio_rdma_no_queues(): the queues were deleted. */
	return smp_load_acquire(&vdev->priv);
}

void virtio_rdma_no_queues(struct virtio_device *vdev)
{
	store_release_wake_up(&vdev->priv, NULL);
}

void virtio_rdma_wait_no_queues(struct virtio_device *vdev)
{
	wait_var_event(&vdev->priv, !virtio_rdma_has_queues(vdev));
}

void virtio_rdma_device_ready(struct virtio_device *vdev)
{
	virtio_device_ready(vdev);
}

u8 virtio_rdma_get_status(struct virtio_device *vdev)
{
	return vdev->config->get_status(vdev);
}

void virtio_rdma_device_lock(struct device *dev)
{
	device_lock(dev);
}

bool virtio_rdma_device_trylock(struct device *dev)
{
	return device_trylock(dev);
}

void virtio_rdma_device_unlock(struct device *dev)
{
	device_unlock(dev);
}

/*
 * Returns the part that a CPU belongs to: the one with this index among so many
 * that are online, which make parts of about the same size. There are no more
 * parts than CPUs.
 */
unsigned int virtio_rdma_part_of_cpu(unsigned int index, unsigned int count,
				     unsigned int parts)
{
	return index * clamp(parts, 1U, count) / count;
}

/*
 * Lets the interrupt of a queue go to one of so many parts of the CPUs that are
 * online. The kernel chooses one CPU of a part, so that devices share them.
 */
int virtio_rdma_set_affinity(struct virtqueue *vq, unsigned int part,
			     unsigned int parts)
{
	unsigned int cpu, index = 0, count = num_online_cpus();
	cpumask_var_t mask;
	int ret;

	if (!zalloc_cpumask_var(&mask, GFP_KERNEL))
		return -ENOMEM;
	part %= clamp(parts, 1U, count);
	for_each_online_cpu(cpu)
		if (virtio_rdma_part_of_cpu(index++, count, parts) == part)
			cpumask_set_cpu(cpu, mask);
	ret = virtqueue_set_affinity(vq, mask);
	free_cpumask_var(mask);
	return ret;
}

bool virtio_rdma_iommu_mapped(struct device *dev)
{
	return device_iommu_mapped(dev);
}

void virtio_rdma_sg_init_dma(struct scatterlist *sg, dma_addr_t addr,
			     unsigned int len)
{
	sg_init_table(sg, 1);
	sg_dma_address(sg) = addr;
	sg_dma_len(sg) = len;
}

void virtio_rdma_command_failed(struct device *dev, const char *command,
				int command_len, const char *status,
				int status_len)
{
	dev_dbg(dev, "%.*s failed: %.*s\n", command_len, command, status_len,
		status);
}

int virtio_rdma_is_udata_in_empty(struct ib_udata *udata)
{
	return ib_is_udata_in_empty(udata);
}

int virtio_rdma_respond_empty_udata(struct ib_udata *udata)
{
	return ib_respond_empty_udata(udata);
}

struct ib_umem *virtio_rdma_umem_get(struct ib_device *device,
				     unsigned long addr, size_t size,
				     int access)
{
	return ib_umem_get_va(device, addr, size, access);
}

/* The memory that a program names by the core's attributes; NULL if by none. */
struct ib_umem *virtio_rdma_umem_get_cq_buf(struct ib_device *device,
					    struct ib_udata *udata, size_t size,
					    int access)
{
	return ib_umem_get_cq_buf(device,
				  rdma_udata_to_uverbs_attr_bundle(udata), size,
				  access);
}

struct ib_umem *virtio_rdma_umem_get_qp_buf(struct ib_device *device,
					    struct ib_udata *udata, size_t size,
					    int access)
{
	const struct uverbs_attr_bundle *attrs =
		rdma_udata_to_uverbs_attr_bundle(udata);

	/* Both rings of a QP are in one buffer. */
	if (uverbs_attr_is_valid(attrs, UVERBS_ATTR_CREATE_QP_RQ_BUF_UMEM) ||
	    uverbs_attr_is_valid(attrs, UVERBS_ATTR_CREATE_QP_SQ_BUF_UMEM))
		return ERR_PTR(-EINVAL);
	return ib_umem_get_attr(device, attrs, UVERBS_ATTR_CREATE_QP_BUF_UMEM,
				size, access);
}

/* Maps a dma-buf; returns where the part of it that @umem is begins. */
void *virtio_rdma_umem_vmap(struct ib_umem *umem)
{
	struct dma_buf *dmabuf = to_ib_umem_dmabuf(umem)->attach->dmabuf;
	struct iosys_map map;
	int ret;

	ret = dma_buf_vmap_unlocked(dmabuf, &map);
	if (ret)
		return ERR_PTR(ret);
	if (map.is_iomem) {
		dma_buf_vunmap_unlocked(dmabuf, &map);
		return ERR_PTR(-EOPNOTSUPP);
	}
	return map.vaddr + umem->address;
}

void virtio_rdma_umem_vunmap(struct ib_umem *umem, void *start)
{
	struct iosys_map map = IOSYS_MAP_INIT_VADDR(start - umem->address);

	dma_buf_vunmap_unlocked(to_ib_umem_dmabuf(umem)->attach->dmabuf, &map);
}

/* @mapped is what virtio_rdma_umem_vmap() returned, NULL without a dma-buf. */
bool virtio_rdma_umem_store(struct ib_umem *umem, void *mapped, size_t offset,
			    u32 value)
{
	size_t start = mapped ? 0 : offset_in_page(umem->address);
	void *page;

	if (umem->is_dmabuf != !!mapped || !umem->writable ||
	    offset + sizeof(value) > min(umem->length, PAGE_SIZE - start))
		return false;
	page = mapped ?: kmap_local_page(sg_page(umem->sgt_append.sgt.sgl));
	/* Pairs with the acquire by which a program reads the word. */
	smp_store_release((u32 *)(page + start + offset), value);
	if (!mapped)
		kunmap_local(page);
	return true;
}

bool virtio_rdma_umem_load(struct ib_umem *umem, void *mapped, size_t offset,
			   u32 *value)
{
	size_t start = mapped ? 0 : offset_in_page(umem->address);
	void *page;

	if (umem->is_dmabuf != !!mapped ||
	    offset + sizeof(*value) > min(umem->length, PAGE_SIZE - start))
		return false;
	page = mapped ?: kmap_local_page(sg_page(umem->sgt_append.sgt.sgl));
	*value = READ_ONCE(*(u32 *)(page + start + offset));
	if (!mapped)
		kunmap_local(page);
	return true;
}

size_t virtio_rdma_umem_num_blocks(struct ib_umem *umem, unsigned long pgsz)
{
	return ib_umem_num_dma_blocks(umem, pgsz);
}

void virtio_rdma_block_iter_start(struct ib_block_iter *iter,
				  struct ib_umem *umem, unsigned long pgsz)
{
	__rdma_umem_block_iter_start(iter, umem, pgsz);
}

/* Lists the next blocks in up to @max entries; returns how many there were. */
size_t virtio_rdma_block_iter_list(struct ib_block_iter *iter, __le64 *list,
				   size_t max)
{
	size_t n = 0;

	while (n < max && __rdma_umem_block_iter_next(iter)) {
		dma_addr_t block = rdma_block_iter_dma_address(iter);

		WRITE_ONCE(list[n++], cpu_to_le64(block));
	}
	return n;
}

void virtio_rdma_dev_put(struct net_device *ndev)
{
	dev_put(ndev);
}

struct net_device *virtio_rdma_notifier_netdev(void *info)
{
	return netdev_notifier_info_to_dev(info);
}

/*
 * Whether an interface may be paired with an RDMA device of @net. Anybody who
 * has a network namespace can make an interface there with any address, but
 * not one of a device in it.
 */
static bool virtio_rdma_netdev_is_near(const struct net_device *ndev,
				       const struct net *net)
{
	return net_eq(dev_net(ndev), net) || ndev->dev.parent;
}

/*
 * Whether an interface is on top of another one, whose address it may have. It
 * is told of before it is on top of anything, so its kind tells as well. A
 * failover interface is what its guest uses in place of those below.
 */
static bool virtio_rdma_netdev_is_upper(const struct net_device *ndev)
{
	if (is_vlan_dev(ndev) || netif_is_bridge_master(ndev) ||
	    netif_is_lag_master(ndev) || netif_is_macvlan(ndev))
		return true;
	return !list_empty(&ndev->adj_list.lower) && !netif_is_failover(ndev);
}

bool virtio_rdma_netdev_own_mac(const struct net_device *ndev,
				struct ib_device *ibdev, u8 *mac)
{
	if (!virtio_rdma_netdev_is_near(ndev, rdma_dev_net(ibdev)) ||
	    ndev->type != ARPHRD_ETHER || ndev->addr_len != ETH_ALEN ||
	    virtio_rdma_netdev_is_upper(ndev))
		return false;
	ether_addr_copy(mac, ndev->dev_addr);
	return true;
}

/* Whether NETDEV_UNREGISTER says that the interface leaves its namespace only. */
bool virtio_rdma_netdev_is_moving(const struct net_device *ndev)
{
	return ndev->reg_state == NETREG_REGISTERED;
}

/* The namespace of @ibdev; init_net, to which the device moves, if it ends. */
struct net *virtio_rdma_get_net(struct ib_device *ibdev)
{
	struct net *net;

	rcu_read_lock();
	net = maybe_get_net(rdma_dev_net(ibdev));
	rcu_read_unlock();
	return net ?: get_net(&init_net);
}

void virtio_rdma_put_net(struct net *net)
{
	put_net(net);
}

static struct pci_dev *virtio_rdma_pci_dev_of(struct device *dev)
{
	if (dev && !dev_is_pci(dev))
		dev = dev->parent;
	return dev && dev_is_pci(dev) ? to_pci_dev(dev) : NULL;
}

/*
 * The device below which the RDMA device of the virtio device @dev stands. As
 * with other adapters, this is the PCI function if there is one: programs look
 * for RDMA devices there, and read the function's attributes by the link
 * "device" of the RDMA device.
 */
struct device *virtio_rdma_parent_of(struct device *dev)
{
	struct pci_dev *pdev = virtio_rdma_pci_dev_of(dev);

	return pdev ? &pdev->dev : dev;
}

bool virtio_rdma_netdev_is_pci_sibling(const struct net_device *ndev,
				       struct device *dev)
{
	struct pci_dev *nic = virtio_rdma_pci_dev_of(ndev->dev.parent);
	struct pci_dev *rdma = virtio_rdma_pci_dev_of(dev);

	return nic && rdma && nic != rdma && nic->bus == rdma->bus &&
	       PCI_SLOT(nic->devfn) == PCI_SLOT(rdma->devfn);
}

unsigned int virtio_rdma_netdev_port_state(struct net_device *ndev)
{
	return ib_get_curr_port_state(ndev);
}

unsigned int virtio_rdma_netdev_port_mtu(const struct net_device *ndev)
{
	return iboe_get_mtu(ndev->mtu);
}

unsigned int virtio_rdma_num_online_cpus(void)
{
	return num_online_cpus();
}

bool virtio_rdma_need_resched(void)
{
	return need_resched();
}

struct nlattr *virtio_rdma_nla_nest_start(struct sk_buff *skb, int attrtype)
{
	return nla_nest_start(skb, attrtype);
}

int virtio_rdma_nla_nest_end(struct sk_buff *skb, struct nlattr *start)
{
	return nla_nest_end(skb, start);
}

void virtio_rdma_nla_nest_cancel(struct sk_buff *skb, struct nlattr *start)
{
	nla_nest_cancel(skb, start);
}

/*
 * Operations of struct ib_device_ops whose type has an enum: to CONFIG_CFI,
 * a function of Rust, which has an integer there, is of another type.
 */
int virtio_rdma_req_notify_cq(struct ib_cq *cq, enum ib_cq_notify_flags flags)
{
	return virtio_rdma_rust_req_notify_cq(cq, flags);
}

int virtio_rdma_modify_srq(struct ib_srq *srq, struct ib_srq_attr *attr,
			   enum ib_srq_attr_mask mask, struct ib_udata *udata)
{
	return virtio_rdma_rust_modify_srq(srq, attr, mask, udata);
}

struct ib_mr *virtio_rdma_alloc_mr(struct ib_pd *pd, enum ib_mr_type mr_type,
				   u32 max_num_sg)
{
	return virtio_rdma_rust_alloc_mr(pd, mr_type, max_num_sg);
}

enum rdma_link_layer virtio_rdma_get_link_layer(struct ib_device *dev, u32 port)
{
	return IB_LINK_LAYER_ETHERNET;
}
